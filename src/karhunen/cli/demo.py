"""`karhunen demo`: the whole job, and a table of what was measured."""

import time

from karhunen.cli.loading import load_model, placed
from karhunen.cli.screen import Screen, grid, rounded


def run(
    model_name: str,
    recipe_text: str,
    calibration_tokens: int,
    prompt_tokens: int,
    scored_tokens: int,
    dtype: str,
    device: str,
    as_json: bool,
) -> None:
    """Run it and show it."""
    from karhunen import recipes
    from karhunen.calibration.placement import chosen
    from karhunen.cli.account import account_table
    from karhunen.evaluation.demo import ANSWER, QUESTION, run_demo

    start = time.perf_counter()
    recipe, devices = recipes.make(recipe_text), chosen(device)
    with Screen(as_json).open() as screen:
        model, tokenizer = load_model(screen, model_name, dtype, placed(screen, model_name, dtype, devices))
        loaded = time.perf_counter()
        with screen.progress("calibrating", "tokens") as advance:
            demo = run_demo(
                model,
                tokenizer,
                recipe,
                calibration_tokens=calibration_tokens,
                prompt_length=prompt_tokens,
                scored_tokens=scored_tokens,
                on_stage=screen.log,
                progress=advance,
            )
        found = rounded(demo.to_dict())
        report = demo.coded.report
        assert report is not None, "the coded run has a compressed cache"
        screen.say(f"Question   {QUESTION} (the document says {ANSWER}, {demo.fact_tokens_before_end} tokens earlier)")
        screen.say(f"dense      {demo.dense.text.strip()}")
        screen.say(f"karhunen   {demo.coded.text.strip()}\n")
        screen.table(account_table(report))
        scored = found["scored"]
        table = grid(
            "measured", "dense", recipe_text, title=f"{model_name} in {dtype} on {', '.join(devices)}", right=(1, 2)
        )
        table.add_row("ratio to a 16-bit cache", "", f"{found['ratio_to_16_bits']:.2f}")
        table.add_row(
            f"logit KL to dense, nats ({scored['tokens']} tokens after {scored['prefill_tokens']:,} of context)",
            "0",
            f"{scored['kl_nats']:.4f}",
        )
        table.add_row("top-1 agreement with dense", "1", f"{scored['top1_agreement']:.3f}")
        table.add_row("perplexity", f"{scored['perplexity_dense']:.3f}", f"{scored['perplexity_coded']:.3f}")
        table.add_row(
            f"seconds to read the prompt ({demo.dense.n_prompt_tokens:,} tokens)",
            f"{demo.dense.prefill_seconds:.2f}",
            f"{demo.coded.prefill_seconds:.2f}",
        )
        table.add_row(
            "seconds per step, median", f"{demo.dense.seconds_per_step:.3f}", f"{demo.coded.seconds_per_step:.3f}"
        )
        screen.table(table)
        seconds = {"load": loaded - start, "total": time.perf_counter() - start}
        screen.say(
            f"{demo.n_calibration_tokens:,} calibration tokens in {demo.calibration_seconds:.1f} s, fitted in "
            f"{demo.fit_seconds:.1f} s; all of it in {seconds['total']:.0f} s"
        )
        screen.document(
            {"model": model_name, "dtype": dtype, "device": ",".join(devices), **found, "seconds": rounded(seconds)}
        )
