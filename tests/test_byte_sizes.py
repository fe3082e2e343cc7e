"""Sizes as people write them: GB and GiB are two units, and what is neither is refused."""

import pytest

from karhunen.byte_sizes import bytes_of, bytes_per_second_of, said_bytes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("24GB", 24 * 10**9), ("24GiB", 24 * 2**30), ("24 gib", 24 * 2**30), ("1.5g", 1_500_000_000),
        ("512MiB", 512 * 2**20), ("1Ti", 2**40), ("3000000", 3 * 10**6), ("8e9", 8 * 10**9),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text: str, n_bytes: int) -> None:
    assert bytes_of(text) == n_bytes


@pytest.mark.parametrize(
    "text", ["much", "", "24", "300", "-3GB", "0", "GB", "inf", "nan", "1e99999GB", "3iB", "1.2.3GB", "5PB"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size of memory; write it as"):
        bytes_of(text)


def test_a_bandwidth_is_a_size_per_second() -> None:
    assert bytes_per_second_of("3.35TB/s") == 3_350_000_000_000
    assert bytes_per_second_of("936 GB/s") == bytes_per_second_of("936GB") == 936 * 10**9
    for text in ("fast", "", "0GB/s"):
        with pytest.raises(ValueError, match="is no bandwidth; write it as"):
            bytes_per_second_of(text)


def test_bytes_are_said_in_three_digits_or_less() -> None:
    assert [said_bytes(n) for n in (4_000, 16_060_522_496, 512_000_000)] == ["4 kB", "16.1 GB", "512 MB"]
