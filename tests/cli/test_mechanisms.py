"""Every mechanism of the catalog has words."""

from __future__ import annotations

from bstar.catalog.models import all_entries
from bstar.codec.hf_config import model_from_config
from bstar.errors import BstarError
from bstar.interfaces.cli.mechanisms import ffn_text, mixer_kind, mixer_text, positions


def test_every_mechanism_of_the_catalog_has_words() -> None:
    kinds: set[str] = set()
    for entry in all_entries():
        if entry.hf_quant_config is not None:
            continue  # the same mechanisms as the plain checkpoint
        try:
            model = model_from_config(entry.config, name=entry.id)
        except BstarError:
            continue
        for group in model.layers:
            kinds.add(mixer_kind(group.mixer))
            assert mixer_text(group.mixer) or group.mixer.kind == "none", group.mixer
            assert ffn_text(group.ffn) or group.ffn.kind == "none", group.ffn
    assert {"full_attention", "sliding_attention", "mla", "gated_delta_net", "mamba2", "none"} <= kinds


def test_positions() -> None:
    assert positions([0, 1, 2]) == "0–2"
    assert positions([3, 7, 11, 15]) == "3, 7, … 15"
    assert positions([0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16]) == "0–2, 4–6, … 16"
    assert positions([5]) == "5"
