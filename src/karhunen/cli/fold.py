"""`karhunen fold`: a model whose weights hold the latent of `spectra`, in a folder that loads like any other."""

from pathlib import Path

from karhunen.cli.loading import load_model, placed
from karhunen.cli.screen import Screen, rounded


def run(
    output: Path,
    model_name: str,
    codec_folder: Path | None,
    key_rank: int | None,
    value_rank: int | None,
    correct_output: bool,
    texts: tuple[Path, ...],
    max_tokens: int,
    dtype: str,
    device: str,
    as_json: bool,
) -> None:
    """Write the folded model to `output`; ranks come from a codec's water-filling or are the same for every layer."""
    from karhunen.calibration.calibrate import calibrate
    from karhunen.calibration.output_correction import correct_outputs
    from karhunen.calibration.placement import chosen
    from karhunen.calibration.texts import calibration_text, read_texts
    from karhunen.codec import Codec
    from karhunen.folder import check_new
    from karhunen.hf.describe import identity_of
    from karhunen.hf.fold import fold, kept_ranks
    from karhunen.statistics.need import Need
    from karhunen.transforms.spectra_latent import activations_need

    if (codec_folder is None) == (key_rank is None and value_rank is None):
        raise ValueError("give either --codec, whose water-filling says the ranks, or --key-rank and --value-rank")
    if codec_folder is None and (key_rank is None or value_rank is None):
        raise ValueError("--key-rank and --value-rank go together")
    if correct_output and codec_folder is None:
        raise ValueError("--correct-output corrects what a codec does; it needs --codec")
    check_new(output)
    devices = chosen(device)
    codec = None if codec_folder is None else Codec.from_pretrained(codec_folder)
    ranks = {} if codec is None else kept_ranks(codec)
    with Screen(as_json).open() as screen:
        given = read_texts(texts) if texts else calibration_text()
        model, tokenizer = load_model(screen, model_name, dtype, placed(screen, model_name, dtype, devices))
        if codec is not None:
            codec.check_model(identity_of(model))
        skip = 4 if codec is None else codec.window.sink_tokens
        with screen.progress("calibrating", "tokens") as advance:
            needs = [activations_need(Need("moments", "key", skip_tokens=skip))]
            statistics = calibrate(model, given, needs, tokenizer, max_tokens=max_tokens, progress=advance)
        ranks = ranks or dict.fromkeys(sorted(statistics.layers), (key_rank or 0, value_rank or 0))
        weights = None
        if correct_output and codec is not None:
            with screen.progress("correcting", "tokens") as advance:
                weights = correct_outputs(model, codec, given, tokenizer, max_tokens=max_tokens, progress=advance)
        screen.log(f"folding {len(ranks)} layers")
        fold(model, statistics, output, ranks, weights, tokenizer)
        held = sum(sum(pair) for pair in ranks.values())
        dense = sum(statistics.shape(layer).elements_per_token for layer in ranks)
        screen.say(
            f"{output}: {len(ranks)} layers folded; a token caches {held:,} numbers in place of {dense:,} "
            f"({dense / held:.2f} times fewer); load it with trust_remote_code=True"
        )
        screen.document(
            rounded(
                {
                    "model": str(output),
                    "device": ",".join(devices),
                    "ranks": {str(layer): list(pair) for layer, pair in ranks.items()},
                    "output_corrected": weights is not None,
                    "calibration_tokens": statistics.n_tokens,
                    "cached_elements_per_token": held,
                    "dense_elements_per_token": dense,
                }
            )
        )
