"""Who takes part: every node's answer to the one question it is asked, checked.

Simulated node ids are random, so nothing may depend on them: members are kept sorted by
partition id, and a round's clients are a function of (seed, round) and the members.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ravan_flwr.seeding import generator


@dataclass(frozen=True)
class Member:
    """One node, as it described itself."""

    node_id: int
    partition_id: int
    num_partitions: int
    own_data: bool  # not a share of the data that all know
    examples: int
    share: float  # of the largest budget
    device: str
    free_memory: int  # bytes
    versions: str
    code: str  # fingerprint of this package's own files
    backbone: str  # fingerprint of what is pretrained
    derived: tuple[float, ...]  # fingerprint of what is made from the seed

    def as_config(self) -> dict[str, Any]:
        """For the answer's ConfigRecord; `read_member` is the inverse."""
        return {
            "partition-id": self.partition_id,
            "num-partitions": self.num_partitions,
            "own-data": self.own_data,
            "examples": self.examples,
            "share": self.share,
            "device": self.device,
            "free-memory": self.free_memory,
            "versions": self.versions,
            "code": self.code,
            "backbone": self.backbone,
            "derived": list(self.derived),
        }


def read_member(node_id: int, answer: Mapping[str, Any]) -> Member:
    """The member that an answer of unknown origin describes; ValueError if it is not sound."""
    kinds: dict[str, type] = {
        "partition-id": int,
        "num-partitions": int,
        "own-data": bool,
        "examples": int,
        "share": float,
        "device": str,
        "free-memory": int,
        "versions": str,
        "code": str,
        "backbone": str,
        "derived": list,
    }
    for key, kind in kinds.items():
        if type(answer.get(key)) is not kind:
            raise ValueError(f"{key} is {answer.get(key)!r}, expected {kind.__name__}")
    if not all(type(number) is float for number in answer["derived"]):
        raise ValueError(f"derived is {answer['derived']!r}, expected float numbers")
    if not 0 <= answer["partition-id"] < answer["num-partitions"]:
        raise ValueError(
            f"partition-id is {answer['partition-id']}, expected 0 to "
            f"{answer['num-partitions'] - 1} (num-partitions - 1)"
        )
    if answer["examples"] < 1:
        raise ValueError(f"examples is {answer['examples']}, expected at least 1")
    if not 0 < answer["share"] <= 1:
        raise ValueError(f"share is {answer['share']}, expected above 0 and at most 1")
    values = {key.replace("-", "_"): answer[key] for key in kinds}
    return Member(node_id=node_id, **values | {"derived": tuple(answer["derived"])})


def check_same_app(member: Member, code: str, backbone: str, derived: Sequence[float]) -> None:
    """Raise ValueError unless a member has the server's code, backbone and bases."""
    if member.code != code:
        raise ValueError(
            f"its ravan_flwr has fingerprint {member.code}, expected {code}: other files than the "
            "server's; in a simulation the SuperLink was started in another checkout, so end it "
            "and run again"
        )
    if member.backbone != backbone:
        raise ValueError(
            f"its backbone has fingerprint {member.backbone}, expected {backbone}: another model, "
            f"revision or library (it has {member.versions}); give it the server's"
        )
    check_derived(member.derived, derived, member.versions)


def check_derived(got: Sequence[float], expected: Sequence[float], versions: str = "") -> None:
    """Raise ValueError unless bases and classifier agree to rounding."""
    same = len(got) == len(expected) and all(
        math.isclose(g, e, rel_tol=1e-4, abs_tol=1e-4) for g, e in zip(got, expected, strict=True)
    )
    if not same:
        raise ValueError(
            f"its bases have fingerprint {list(got)}, expected {list(expected)}: they were made "
            f"from another seed, rank, scheme or library {versions}; give it the server's"
        )


def sample(members: Sequence[Member], number: int, seed: int, round_number: int) -> list[Member]:
    """The clients of a round, a function of its number, sorted by partition id."""
    order = torch.randperm(len(members), generator=generator(seed, "sample", round_number))
    pool = sorted(members, key=lambda member: member.partition_id)
    return [pool[i] for i in sorted(order[:number].tolist())]
