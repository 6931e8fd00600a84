"""Cryptographic primitives against the test vectors of their RFCs."""

from contextlib import suppress

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sympy import nextprime

from ravan_flwr.extras.secure import agreement, shamir
from ravan_flwr.extras.secure.node_keys import is_signed


def test_x25519_equals_rfc_7748():
    """Section 6.1: Alice and Bob."""
    a = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    b = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    public_a = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    public_b = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
    secret = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    assert agreement.derive_public_key(a) == public_a
    assert agreement.derive_public_key(b) == public_b
    assert agreement.shared_secret(a, public_b) == agreement.shared_secret(b, public_a) == secret


def test_a_public_key_of_low_order_is_refused():
    with pytest.raises(ValueError, match="low order"):
        agreement.shared_secret(agreement.new_key(), bytes(32))


def test_hkdf_equals_rfc_5869():
    """Appendix A.1."""
    found = agreement.derive(
        bytes([0x0B] * 22), bytes(range(13)), bytes(range(0xF0, 0xFA)), length=42
    )
    assert found.hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )


def test_chacha20_equals_rfc_8439():
    """Appendix A.1, vector 1 (block 0), and section 2.3.2 (block 1)."""
    zero = agreement.keystream(bytes(32), bytes(12))(64)
    assert zero.hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    nonce = bytes.fromhex("000000090000004a00000000")
    more = agreement.keystream(bytes(range(32)), nonce)
    first, second = more(64), more(64)
    assert first != second
    assert second.hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


def test_sealing_equals_rfc_8439():
    """Section 2.8.2."""
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the "
        b"future, sunscreen would be it."
    )
    bound = bytes.fromhex("50515253c0c1c2c3c4c5c6c7")
    nonce = bytes.fromhex("070000004041424344454647")
    key = bytes(range(0x80, 0xA0))
    sealed = agreement.seal(key, text, bound, nonce)
    assert sealed[:16].hex() == "d31a8d34648e60db7b86afbc53ef7ec2"
    assert sealed[-16:].hex() == "1ae10b594f09e26a7e902ecbd0600691"
    assert agreement.open_sealed(key, sealed, bound, nonce) == text
    for false in (sealed[:-1] + b"\0", sealed[1:], b""):
        with pytest.raises(ValueError, match="not sealed for this"):
            agreement.open_sealed(key, false, bound, nonce)
    with pytest.raises(ValueError, match="not sealed for this"):
        agreement.open_sealed(key, sealed, bound + b"\0", nonce)


def test_ed25519_equals_rfc_8032():
    """Section 7.1, test 2."""
    private = "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"
    public = "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    signature = (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private))
    assert key.sign(b"\x72").hex() == signature
    assert is_signed(bytes.fromhex(public), bytes.fromhex(signature), b"\x72")
    assert not is_signed(bytes.fromhex(public), bytes.fromhex(signature), b"\x73")
    assert not is_signed(b"short", bytes.fromhex(signature), b"\x72")


def test_shamir_equals_the_textbook_example():
    """1234 + 166 x + 94 x^2, as in the article of Wikipedia: no value reaches the prime."""
    values = [1494, 1942, 2578, 3402, 4414, 5614]
    assert [shamir.value_at([1234, 166, 94], x) for x in range(1, 7)] == values
    shares = {place: value.to_bytes(33, "big") for place, value in enumerate(values)}
    secret = (1234).to_bytes(32, "big")
    for three in ((0, 1, 2), (1, 3, 4), (5, 0, 3)):
        assert shamir.join({place: shares[place] for place in three}, 3) == secret
    with pytest.raises(ValueError, match="got 2 shares, expected at least 3"):
        shamir.join({0: shares[0], 1: shares[1]}, 3)


def test_the_prime_is_the_first_above_any_secret():
    assert nextprime(2**256) == shamir.PRIME


def test_two_shares_of_three_reveal_the_secret_and_one_reveals_nothing():
    """With one share every secret is equally likely: for each there is a line through it."""
    secret = bytes(range(32))
    shares = shamir.split(secret, 2, 3)
    assert shamir.join({0: shares[0], 2: shares[2]}, 2) == secret
    x, y = 1, shamir.unpack(shares[0])
    for other in (0, 1, 2**256 - 1):
        slope = (y - other) * pow(x, -1, shamir.PRIME) % shamir.PRIME
        assert shamir.value_at([other, slope], x) == y
    assert shamir.split(secret, 2, 3) != shares
    assert shamir.unpack(shamir.split(secret, 1, 1)[0]) == int.from_bytes(secret, "big")
    with pytest.raises(ValueError, match="no share"):
        shamir.unpack(shamir.NO_SHARE)
    with pytest.raises(ValueError, match="no share"):
        shamir.unpack(b"\0" * 32)


def test_the_first_number_that_is_no_secret_and_the_first_that_is_no_share():
    assert shamir.join({0: (2**256 - 1).to_bytes(33, "big")}, 1) == b"\xff" * 32
    with pytest.raises(ValueError, match="do not belong together"):
        shamir.join({0: (2**256).to_bytes(33, "big")}, 1)
    assert shamir.unpack((shamir.PRIME - 1).to_bytes(33, "big")) == 2**256 + 296
    with pytest.raises(ValueError, match="below the prime"):
        shamir.unpack(shamir.PRIME.to_bytes(33, "big"))


def test_false_shares_give_another_secret_or_an_error():
    shares = dict(enumerate(shamir.split(bytes(32), 3, 5)))
    shares[0] = (shamir.unpack(shares[0]) ^ 1).to_bytes(33, "big")
    assert shamir.join({k: v for k, v in shares.items() if k}, 3) == bytes(32)
    with suppress(ValueError):  # mostly no valid secret, or else another
        assert shamir.join(shares, 3) != bytes(32)
