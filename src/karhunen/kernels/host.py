"""The host's memory, named once for all kernels, which import nothing of the rest."""

import torch

HOST = torch.device("cpu")
