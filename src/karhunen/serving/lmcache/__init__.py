"""karhunen as a serde of LMCache: chunks are coded on their way to its second tier (disk, network)."""
