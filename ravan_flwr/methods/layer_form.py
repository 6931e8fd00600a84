"""Decide how multi-head layers are computed: merged into one weight, or factored.

A merged weight of few bits loses every small update (adapters/merged.py). So a run in few bits has
factored layers, the run config may not ask for merged ones then, and a plan counts what the run
does. Where neither is asked for ("auto"), each layer takes the form that is less work.
"""


def layer_form(asked: str, precision: str, quantize: str) -> str:
    """Settle the form that a run's layers are told; ValueError if it would lose updates."""
    for key, got, whole in (("precision", precision, "float32"), ("quantize", quantize, "none")):
        if got == whole:
            continue
        if asked == "merged":
            raise ValueError(
                f"layer-form = 'merged': got {key} = {got!r}, expected {whole!r}, since a weight "
                "of few bits loses small updates; leave layer-form out"
            )
        return "factored"
    return asked
