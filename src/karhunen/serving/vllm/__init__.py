"""karhunen as a KV connector of vLLM: `register` is called by the engine, in each of its processes."""

CONNECTOR = "KarhunenConnector"
MODULE = "karhunen.serving.vllm.connector"


def register() -> None:
    """Make `KarhunenConnector` known to `--kv-transfer-config`; a second call does nothing.

    Found by the engine through the entry point `vllm.general_plugins`.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    except ValueError:  # registered already: the engine loads its plug-ins several times in one process
        if KVConnectorFactory.get_connector_class_by_name(CONNECTOR).__module__ != MODULE:
            raise
