"""karhunen as a storage backend of SGLang's hierarchical cache. Written against 0.5.23 and not run there."""
