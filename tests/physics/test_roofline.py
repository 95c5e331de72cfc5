"""The roofline and prefill arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bstar.catalog.devices import get_device
from bstar.errors import SpecError
from bstar.physics import prefill, roofline
from bstar.physics.arithmetic import computed_dtype, fallback_note


def test_the_roof_has_its_corner_at_the_ridge() -> None:
    peak, bandwidth = 312e12, 2.039e12
    ridge = roofline.ridge_point(peak, bandwidth)
    assert roofline.attainable_flops_per_s(ridge, peak, bandwidth) == peak
    assert roofline.attainable_flops_per_s(ridge / 2, peak, bandwidth) == peak / 2
    assert roofline.attainable_flops_per_s(ridge * 9, peak, bandwidth) == peak


def test_small_batches_have_intensity_of_the_batch_over_the_bytes_per_parameter() -> None:
    for bytes_per_parameter, per_sequence in ((2.0, 1.0), (1.0, 2.0), (0.5, 4.0)):
        ai = roofline.arithmetic_intensity(4.0, 8e9, 8e9 * bytes_per_parameter)
        assert ai == 4.0 * per_sequence


@given(batch=st.floats(1, 1e4), kv=st.floats(1e5, 1e9))
def test_intensity_never_passes_its_limit(batch: float, kv: float) -> None:
    assert roofline.arithmetic_intensity(batch, 8e9, 16e9, kv) < roofline.arithmetic_intensity_limit(8e9, kv)


def test_without_a_cache_the_limit_is_infinite() -> None:
    assert roofline.arithmetic_intensity_limit(8e9, 0.0) == math.inf
    assert np.isinf(roofline.arithmetic_intensity_limit(8e9, np.array([0.0, 1.0]))[0])  # type: ignore[index]


@given(first=st.integers(1, 5000), second=st.integers(1, 5000), cached=st.integers(0, 5000))
def test_pairs_of_chunks_add_up(first: int, second: int, cached: int) -> None:
    whole = prefill.causal_pairs(first + second, cached)
    assert prefill.causal_pairs(first, cached) + prefill.causal_pairs(second, cached + first) == whole


def test_narrow_weights_are_computed_in_16_bits_where_there_are_no_narrow_cores() -> None:
    a100, h100 = get_device("a100-sxm-80gb"), get_device("h100-sxm-80gb")
    assert computed_dtype(h100, "fp8") == "fp8"
    assert computed_dtype(a100, "fp8") == "bf16"
    assert computed_dtype(h100, "fp4") == "bf16"
    assert fallback_note(h100, "fp8") is None
    assert "dequantized" in (fallback_note(a100, "fp8") or "")
    with pytest.raises(SpecError, match="int4"):
        computed_dtype(h100, "int4")


def test_attention_adds_four_flops_per_byte_to_the_limit_of_an_8b() -> None:
    """4·32·32·128 FLOPs a token on 131,072 bytes of cache (mission page, section 6)."""
    kv = 131072 * 4096.0
    attention = prefill.attention_flops_per_pair(32, 32, 128) * 4096
    with_attention = roofline.arithmetic_intensity_limit(8e9, kv, attention)
    assert with_attention - roofline.arithmetic_intensity_limit(8e9, kv) == pytest.approx(4.0)
