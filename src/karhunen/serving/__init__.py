"""karhunen inside the engines that people run: vLLM, LMCache, SGLang. Nothing here is imported by `import karhunen`."""
