"""The Kubernetes cluster that this process runs in, if it does."""

import os
from pathlib import Path

from kubernetes.aio import client, config
from kubernetes.aio.config.config_exception import ConfigException

from equipoise.balancer.leadership.register import RegisterError

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


async def connect() -> tuple[client.ApiClient, str]:
    """A client of the cluster that this process runs in, and its namespace there.

    Outside of one it is that of the user's kubeconfig.

    Raises:
        RegisterError: there is no cluster to be found.
    """
    configuration = client.Configuration()
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(configuration)
            namespace = _own_namespace()
        else:
            await config.load_kube_config(client_configuration=configuration)
            namespace = "default"
    except (ConfigException, OSError) as error:
        raise RegisterError(
            f"no Kubernetes cluster is configured ({error}): run in one, or use --lease=store"
        ) from error
    return client.ApiClient(configuration), namespace


def _own_namespace() -> str:
    return _NAMESPACE_FILE.read_text().strip()
