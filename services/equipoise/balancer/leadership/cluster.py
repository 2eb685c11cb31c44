"""Access to the Kubernetes cluster."""

import os
from pathlib import Path

from kubernetes.aio import client, config
from kubernetes.aio.config.config_exception import ConfigException

from equipoise.balancer.leadership.register import RegisterError

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


async def connect() -> tuple[client.ApiClient, str]:
    """Connect to the cluster that this process runs in, else to that of the user's kubeconfig.

    Returns the client and the namespace.

    Raises:
        RegisterError: no cluster is configured.
    """
    configuration = client.Configuration()
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(configuration)
            namespace = _NAMESPACE_FILE.read_text().strip()  # noqa: ASYNC240 - a small local file
        else:
            await config.load_kube_config(client_configuration=configuration)
            namespace = "default"
    except (ConfigException, OSError) as error:
        raise RegisterError(
            f"no Kubernetes cluster is configured ({error}): run in one, or use --lease=store"
        ) from error
    return client.ApiClient(configuration), namespace
