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
    from karhunen.codec import FORMAT
    from karhunen.fitting import fit
    from karhunen.folder import check_target, check_writable
    from karhunen.statistics import artifact

    if saved is not None and (texts or resume is not None or keep_statistics):
        raise ValueError("--statistics fits what was measured before; leave out --text, --resume and --keep-statistics")
    recipe = recipes.make(recipe_text)
    beside = output / "statistics"
    check_target(output, FORMAT)
    if keep_statistics:
        check_target(beside, artifact.FORMAT)
    if resume is not None:
        check_writable(resume)
    with Screen(as_json).open() as screen:
        if saved is not None:
            statistics = artifact.load_statistics(saved)
        else:
            given = read_texts(texts) if texts else calibration_text()
            model, tokenizer = load_model(screen, model_name, dtype)
            with screen.progress("calibrating", "tokens") as advance:
                statistics = calibrate(
                    model, given, recipe.needs(), tokenizer, max_tokens=max_tokens, resume_dir=resume, progress=advance
                )
        screen.log(f"fitting {recipe.name}")
        codec = fit(recipe, statistics)
        for note in codec.origin.notes:
            screen.log(note)
        codec.save_pretrained(output)
        if keep_statistics:
            artifact.save_statistics(statistics, beside)
        elif beside.exists() and (saved is None or saved.resolve() != beside.resolve()):
            screen.log(f"{beside} are of an earlier calibration, and stay; --keep-statistics writes new ones there")
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
                    "notes": list(codec.origin.notes),
                    "statistics": str(beside) if keep_statistics else None,
                }
            )
        )
