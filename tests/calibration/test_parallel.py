"""One, two and four processes measure the same bits, end together, and go on where they stopped."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.calibration import spawned
from tests.synthetic import quick

from karhunen import recipes
from karhunen.calibration.parallel import Processes
from karhunen.calibration.steps import gradient_pieces, steps_of
from karhunen.codec import Codec
from karhunen.fitting import fit
from karhunen.recipe import Recipe
from karhunen.statistics.artifact import load_statistics
from karhunen.statistics.gathered import Statistics

pytestmark = pytest.mark.slow


def assert_same_bits(one: Statistics, other: Statistics) -> None:
    assert one.sources == other.sources
    assert one.layers.keys() == other.layers.keys()
    for index, layer in one.layers.items():
        theirs = other.layers[index]
        assert (layer.n_tokens, layer.softmax_scale) == (theirs.n_tokens, theirs.softmax_scale)
        assert list(layer.measured) == list(theirs.measured)
        for need, statistic in layer.measured.items():
            for name, tensor in vars(statistic).items():
                assert torch.equal(tensor, getattr(theirs.measured[need], name)), (index, str(need), name)


@pytest.fixture(scope="module")
def by_one() -> Statistics:
    return spawned.measured()


def untrained() -> Recipe:
    recipe = recipes.make("karhunen")
    made = quick(recipe)
    return replace(recipe, key=made.key, value=made.value)


@pytest.fixture(scope="module")
def codec_by_one(by_one: Statistics) -> Codec:
    return fit(untrained(), by_one)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    work = (
        spawned.whole, spawned.in_pairs, spawned.failing, spawned.with_other_text, spawned.by_itself,
        spawned.sharing, spawned.interrupted_and_resumed, spawned.lost,
    )  # fmt: skip
    spawned.run_together(2, folder, work)
    return folder


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    spawned.run_together(4, folder, (spawned.whole,))
    return folder


@pytest.mark.parametrize(("group", "size"), [("of_two", 2), ("of_four", 4)])
def test_any_number_of_processes_measures_the_same_bits(
    group: str, size: int, by_one: Statistics, codec_by_one: Codec, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder: Path = request.getfixturevalue(group)
    for rank in range(size):
        assert_same_bits(load_statistics(folder / f"statistics-{rank}"), by_one)
    fit(untrained(), load_statistics(folder / "statistics-0")).save_pretrained(tmp_path / "ours")
    codec_by_one.save_pretrained(tmp_path / "theirs")
    names = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert "config.json" in names
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name


def test_sequences_in_pairs_are_dealt_out_alike(of_two: Path) -> None:
    assert_same_bits(load_statistics(of_two / "pairs-1"), spawned.measured(batch=2))


def test_layers_that_share_a_cache_are_measured_alike(of_two: Path) -> None:
    """A step's sums are whole before they are added, or the order of a sum would tell the processes apart."""
    assert_same_bits(load_statistics(of_two / "shared-1"), spawned.of_shared_layers())


def test_a_failure_of_one_process_ends_all_with_its_words(of_two: Path) -> None:
    first, second = ((of_two / f"failing-{rank}").read_text() for rank in range(2))
    assert second.startswith("ValueError: layer 1: its values hold NaN or infinity")
    assert first == f"ValueError: process 1 of 2 (counted from 0): {second.removeprefix('ValueError: ')}"


def test_other_text_in_one_process_is_refused_by_all(of_two: Path) -> None:
    for rank in range(2):
        assert "were given other models, texts, needs or layers" in (of_two / f"other-{rank}").read_text()


def test_a_process_that_is_told_so_calibrates_by_itself(of_two: Path) -> None:
    assert [int((of_two / f"alone-{rank}").read_text()) for rank in range(2)] == [4 * 296, 3 * 296]


def test_an_interrupted_calibration_of_two_goes_on_where_it_stopped(of_two: Path, by_one: Statistics) -> None:
    assert (of_two / "interrupted-0").read_text() == "Interrupt: stopped by its user"
    assert "process 0 of 2 (counted from 0): stopped by its user" in (of_two / "interrupted-1").read_text()
    assert json.loads((of_two / "told-0").read_text()) == [365, 547, 1004, 1734, 2100]  # backward steps weigh four
    assert json.loads((of_two / "told-1").read_text()) == []
    for rank in range(2):
        assert_same_bits(load_statistics(of_two / f"resumed-{rank}"), by_one)
    assert not (of_two / "partial").exists()


def test_a_process_that_is_gone_is_said_to_be(of_two: Path) -> None:
    assert (of_two / "lost-0").read_text().startswith("ConnectionError: another process of this calibration ended")


def test_without_a_group_a_process_is_alone() -> None:
    assert Processes.found() == Processes.alone() == Processes(0, 1)
    with pytest.raises(ValueError, match="there is no process group; call"):
        Processes.of()


def test_neighbours_of_one_length_run_together_and_backward_ones_alone() -> None:
    pieces = [torch.arange(n) for n in (300, 300, 300, 40, 300, 300)]
    steps = steps_of(pieces, batch=2, min_tokens=264)
    forward = [tuple(step.tokens.shape) for step in steps if step.seed is None]
    assert forward == [(2, 300), (1, 300), (1, 40), (2, 300)]
    backward = [step for step in steps if step.seed is not None]
    assert [tuple(step.tokens.shape) for step in backward] == [(1, 300)] * len(gradient_pieces(pieces, 264))
    assert [step.seed for step in backward] == [6 + i for i in range(len(backward))]
