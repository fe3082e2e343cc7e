"""The storage plan of a codec: every byte of its tables is of a transform, a quantizer, or small and shared."""

import pytest
from tests.synthetic import codec

from karhunen.evaluation.results.composition import anatomy


@pytest.mark.parametrize("name", ["nova_kv", "spectra", "karhunen", "int4"])
def test_transforms_and_codebooks_are_the_tables(name: str) -> None:
    """What is left over are frequencies of the rotation and the frame's mean: less than a kilobyte."""
    for side in anatomy(codec(name)).sides:
        rest = side.table_bytes - side.transform_bytes - side.quantizer_bytes
        assert 0 <= rest < 1024


def test_the_plan_of_nova_kv_is_known_beforehand() -> None:
    """Two heads of 32: mean, matrix and inverse in float32; 16 codebooks of 256 entries of 4 float8 numbers."""
    key, value = anatomy(codec("nova_kv")).sides
    assert key.transform_bytes == 2 * 4 * (32 + 2 * 32 * 32)
    assert key.quantizer_bytes >= 16 * 256 * 4
    assert value.transform_bytes == 3 * 2 * 4 * (32 + 2 * 32 * 32), "axes, Hadamard, bit reversal"
