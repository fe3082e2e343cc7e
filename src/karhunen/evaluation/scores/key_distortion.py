"""What coding the keys of one layer costs attention, from statistics alone: no model is run.

E (qᵀ(k − k̂))² ÷ E (qᵀ(k − μ))²,   q over the query heads that read a key

Source: NOVA-KV (arXiv:2608.04074), the distortion D_K. Here it is relative to what a reader that knows only the mean
key would have; the vectors it is measured on are not those the codec was trained on.
"""

from dataclasses import replace

from karhunen.fitting import fit
from karhunen.recipe import Recipe, Side
from karhunen.statistics.gathered import LayerStatistics, Statistics
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need
from karhunen.statistics.samples import Samples
from karhunen.windows.sink_recent import SinkRecent

TRAINING_SHARE = 0.75


def logit_distortion(side: Side, statistics: Statistics, layer: int, sink: int = 4) -> float:
    """Of one way to code keys per head, in the frame of `side`; `sink` tokens of each sequence are left out.

    The first part of the samples trains the codec, the last part measures it. ValueError if the statistics do not hold
    samples and query moments in that frame, or if it is joined or centered.
    """
    if side.frame.joined or side.frame.center:
        raise ValueError("keys are measured head by head as they are; use a frame that is neither joined nor centered")
    recipe = Recipe("one side", side, Side(), SinkRecent(sink, 0))
    about = recipe.about("key")
    measured = statistics.layers[layer]
    samples = measured.get(replace(about, kind="samples"), Samples)
    n = int(samples.vectors.shape[1] * TRAINING_SHARE)
    training = Samples(samples.vectors[:, :n], samples.positions[:n])
    codec = fit(recipe, _alone(statistics, layer, about, training)).layers[0].key
    fresh = samples.vectors[:, n:]
    y = codec.transform.forward(fresh[None])
    back = codec.transform.inverse(codec.quantizer.decode(codec.quantizer.encode(y)))[0]
    metric = query_moments(measured, about).second_moment
    error = (fresh - back).double()
    spread = fresh.double() - training.vectors.double().mean(1, keepdim=True)
    return float(((error @ metric) * error).sum() / ((spread @ metric) * spread).sum())


def query_moments(measured: LayerStatistics, about: Need) -> Moments:
    """Every read counts alike."""
    return measured.get(replace(about, kind="queries", stride=1, quiet_slot=None, quiet_fraction=0.0), Moments)


def _alone(statistics: Statistics, layer: int, about: Need, training: Samples) -> Statistics:
    """Statistics of one layer as those of a whole model, its moments those of the training samples."""
    found = statistics.layers[layer]
    sums = {about: Moments.of(training.vectors), replace(about, kind="samples"): training}
    model = replace(statistics.model, layers=(statistics.shape(layer),))
    return Statistics(model, {0: replace(found, measured={**found.measured, **sums})}, statistics.sources)
