"""`KubernetesEvents`: events for `kubectl get events`. Best effort, with a timeout."""

import logging
import os
import socket
from datetime import UTC, datetime

from aiohttp import ClientError
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException

_COMPONENT = "equipoise-balancer"
_TIMEOUT_S = 5.0
_MOST_CHARACTERS = 1024
"""The API's limit on a message."""

_log = logging.getLogger(__name__)


class KubernetesEvents:
    """Events about this process's pod; needs the permission to create events."""

    def __init__(self, api: client.ApiClient, *, namespace: str) -> None:
        self._api = api
        self._core = client.CoreV1Api(api)
        self._namespace = namespace
        self._pod = os.environ.get("POD_NAME") or socket.gethostname()

    async def warn(self, reason: str, message: str) -> None:
        """Create a warning with a reason and a message; failures are only logged."""
        now = datetime.now(UTC)
        event = client.CoreV1Event(
            metadata=client.V1ObjectMeta(generate_name=f"{self._pod}.", namespace=self._namespace),
            involved_object=client.V1ObjectReference(
                api_version="v1", kind="Pod", name=self._pod, namespace=self._namespace
            ),
            type="Warning",
            reason=reason,
            message=message[:_MOST_CHARACTERS],
            first_timestamp=now,
            last_timestamp=now,
            count=1,
            source=client.V1EventSource(component=_COMPONENT),
        )
        try:
            await self._core.create_namespaced_event(
                self._namespace, event, _request_timeout=_TIMEOUT_S
            )
        except (ApiException, ClientError, TimeoutError, OSError) as error:
            _log.warning("no Kubernetes event could be created: %s", error)

    async def close(self) -> None:
        """Close the connection."""
        await self._api.close()
