"""These tests run engines, and are collected only where one is installed (`make test-serving`)."""

import warnings
from importlib import import_module
from importlib.util import find_spec

HERE = find_spec("vllm") is not None and find_spec("lmcache") is not None
collect_ignore_glob = [] if HERE else ["*"]

if HERE:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the engines' own libraries, and not ours to mend
        import_module("lmcache.v1.distributed.storage_manager")
