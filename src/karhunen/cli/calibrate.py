"""`karhunen calibrate`: text, or saved statistics, become a codec in a folder."""

from pathlib import Path

from karhunen.cli.loading import load_model
from karhunen.cli.screen import Screen, rounded


def run(
    output: Path,
    model_name: str,
    recipe_text: str,
    texts: tuple[Path, ...],
    max_tokens: int,
    resume: Path | None,
    saved: Path | None,
    keep_statistics: bool,
    dtype: str,
    as_json: bool,
) -> None:
    """Write the codec to `output`; everything that can be refused is refused before the model runs."""
    from karhunen import recipes
    from karhunen.calibration.calibrate import calibrate
    from karhunen.calibration.texts import calibration_text, read_texts
    from karhunen.fitting import fit
    from karhunen.folder import check_target
    from karhunen.statistics.artifact import load_statistics, save_statistics

    if saved is not None and (texts or resume is not None or keep_statistics):
        raise ValueError("--statistics fits what was measured before; leave out --text, --resume and --keep-statistics")
    if saved is not None and output.resolve() in (saved.resolve(), *saved.resolve().parents):
        raise ValueError(f"writing {output} would remove the statistics in {saved}; choose another --output")
    recipe = recipes.make(recipe_text)
    check_target(output)
    with Screen(as_json).open() as screen:
        if saved is not None:
            statistics = load_statistics(saved)
        else:
            given = read_texts(texts) if texts else calibration_text()
            model, tokenizer = load_model(screen, model_name, dtype)
            with screen.progress("calibrating", "tokens") as advance:
                statistics = calibrate(
                    model, given, recipe.needs(), tokenizer, max_tokens=max_tokens, resume_dir=resume, progress=advance
                )
        screen.log(f"fitting {recipe.name}")
        codec = fit(recipe, statistics)
        codec.save_pretrained(output)
        if keep_statistics:
            save_statistics(statistics, output / "statistics")
        screen.say(
            f"{output}: {recipe.name} for {codec.model.architecture}, {len(codec.layers)} layers coded, "
            f"{len(codec.left_exact)} exact; {statistics.n_tokens:,} calibration tokens, "
            f"{codec.table_bytes():,} bytes of shared tables"
        )
        screen.document(
            rounded(
                {
                    "codec": str(output),
                    "recipe": recipe.name,
                    "recipe_fingerprint": recipe.fingerprint(),
                    "codec_fingerprint": codec.fingerprint(),
                    "architecture": codec.model.architecture,
                    "coded_layers": sorted(codec.layers),
                    "left_exact": {str(i): reason for i, reason in codec.left_exact.items()},
                    "calibration": list(statistics.sources),
                    "calibration_tokens": statistics.n_tokens,
                    "table_bytes": codec.table_bytes(),
                    "statistics": str(output / "statistics") if keep_statistics else None,
                }
            )
        )
