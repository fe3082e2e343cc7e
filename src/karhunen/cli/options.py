"""Options that several verbs share. Nothing heavy is imported here."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Exactly one JSON document on stdout, nothing else.")]
Model = Annotated[str, typer.Option("--model", help="An embedded name, a local folder, or a model hub's id.")]
RecipeText = Annotated[str, typer.Option("--recipe", help="A recipe with options, such as spectra:bits=2.")]
Dtype = Annotated[str, typer.Option("--dtype", help="What the model runs in: float32, bfloat16 or float16.")]
Device = Annotated[
    str, typer.Option("--device", help="cpu, cuda, cuda:1, several with commas, or auto: spread over all there are.")
]
CodecFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A codec's folder, as `calibrate` writes it.")]
DEFAULT_MODEL = "smollm2"
DEFAULT_RECIPE = "karhunen:bits=2"
DEMO_RECIPE = "karhunen:bits=1.5"  # about 8 times smaller at 4,000 tokens, the exact tokens included
