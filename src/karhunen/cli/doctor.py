"""`karhunen doctor`: what this machine offers."""

from dataclasses import asdict

from karhunen.cli.screen import Screen, grid


def run(online: bool, as_json: bool) -> None:
    """Look and report; a missing part is said, not an error."""
    from karhunen.byte_sizes import said_bytes
    from karhunen.calibration.free_memory import free_bytes
    from karhunen.monitoring.environment import environment

    screen = Screen(as_json)
    with screen.open():
        found = environment(online)
        table = grid("what", "found", "")
        table.add_row("python", found.python, found.platform)
        for name, version in found.versions.items():
            table.add_row(name, version or "not installed", "")
        table.add_section()
        free = {device: free_bytes(device.split()[0]) for device in found.devices}
        for device, n_bytes in free.items():
            table.add_row("device", device, "" if n_bytes is None else f"{said_bytes(n_bytes)} of memory free")
        table.add_row("threads", str(found.n_threads), f"{found.n_cpus} processors")
        table.add_section()
        for read in found.attention:
            table.add_row(f"attention on {read.device}", read.path, read.reason)
        for path in found.fast_paths:
            table.add_row(f"{path.kernel}.{path.path}", "live" if path.live else "not here", path.reason)
        table.add_section()
        table.add_row("cache folder", str(found.cache_folder), "")
        for model in found.models:
            table.add_row(model.name, "ready" if model.ready else "not fetched yet", model.description)
        if found.index is not None:
            table.add_row("package index", "reachable" if found.index[0] else "not reachable", found.index[1])
        screen.table(table)
        document = {**asdict(found), "cache_folder": str(found.cache_folder), "free_bytes": free}
        if found.index is not None:
            document["index"] = {"reachable": found.index[0], "said": found.index[1]}
        screen.document(document)
