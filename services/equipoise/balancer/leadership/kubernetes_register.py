"""`KubernetesRegister`: the lease as a `coordination.k8s.io/v1` Lease, stored by a quorum.

Only plain requests of the client library are used, each with a timeout. Its own leader election
keeps leading through a partition: it has no request timeouts, uses the wall clock, and has no
deadline that is independent of its requests.
"""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from aiohttp import ClientError
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException

from equipoise.balancer.leadership import cluster
from equipoise.balancer.leadership.lease import LeaseRecord, Sighting
from equipoise.balancer.leadership.register import RegisterError

_ADDRESS = "equipoise/leader-address"
_RENEWALS = "equipoise/renewals"
_UNAUTHORIZED, _FORBIDDEN = 401, 403
_NOT_FOUND = 404
_CONFLICT = 409


class KubernetesRegister:
    """A `LeaseRegister` in the Lease `name` of `namespace`, which is created when missing.

    The term is its `leaseTransitions`, so `kubectl get lease` shows the fencing number of pushes.
    """

    def __init__(
        self, api: client.ApiClient, *, namespace: str, name: str, timeout_s: float
    ) -> None:
        self._api = api
        self._leases = client.CoordinationV1Api(api)
        self._namespace = namespace
        self._name = name
        self._timeout_s = timeout_s

    @classmethod
    async def connect(cls, name: str, *, timeout_s: float) -> "KubernetesRegister":
        """Connect as `cluster.connect` does.

        Raises:
            RegisterError: no cluster is configured.
        """
        api, namespace = await cluster.connect()
        return cls(api, namespace=namespace, name=name, timeout_s=timeout_s)

    async def read(self) -> Sighting | None:
        """Return the current record; None if there is none."""
        async with self._explained():
            try:
                lease = await self._leases.read_namespaced_lease(
                    self._name, self._namespace, _request_timeout=self._timeout_s
                )
            except ApiException as error:
                if error.status == _NOT_FOUND:
                    return None
                raise
            return self._sighting(lease)

    async def write(self, record: LeaseRecord, *, replacing: str | None) -> Sighting | None:
        """Replace version `replacing` by `record`; return None if the version differs."""
        lease = self._lease(record, version=replacing)
        async with self._explained():
            try:
                if replacing is None:
                    written = await self._leases.create_namespaced_lease(
                        self._namespace, lease, _request_timeout=self._timeout_s
                    )
                else:
                    written = await self._leases.replace_namespaced_lease(
                        self._name, self._namespace, lease, _request_timeout=self._timeout_s
                    )
            except ApiException as error:
                if error.status in {_NOT_FOUND, _CONFLICT}:
                    return None
                raise
            return self._sighting(written)

    async def close(self) -> None:
        """Close the connection."""
        await self._api.close()

    @asynccontextmanager
    async def _explained(self) -> AsyncIterator[None]:
        where = f"lease {self._namespace}/{self._name}"
        try:
            yield
        except ApiException as error:
            is_right = error.status in {_UNAUTHORIZED, _FORBIDDEN}
            remedy = "the service account needs get, create and update on leases"
            raise RegisterError(
                f"{where}: the cluster rejects the request ({error.status} {error.reason}): "
                f"{remedy if is_right else 'check its API server'}"
            ) from error
        except (ClientError, TimeoutError, OSError) as error:
            raise RegisterError(
                f"{where}: the cluster cannot be reached ({error!r}): check the network"
            ) from error

    def _lease(self, record: LeaseRecord, *, version: str | None) -> client.V1Lease:
        return client.V1Lease(
            api_version="coordination.k8s.io/v1",
            kind="Lease",
            metadata=client.V1ObjectMeta(
                name=self._name,
                namespace=self._namespace,
                resource_version=version,
                annotations={_ADDRESS: record.address, _RENEWALS: str(record.renewals)},
            ),
            spec=client.V1LeaseSpec(
                holder_identity=record.holder,
                lease_duration_seconds=math.ceil(record.duration_s),
                lease_transitions=record.term,
                # For display only: clocks of two machines are never compared.
                renew_time=datetime.now(UTC),
            ),
        )

    def _sighting(self, lease: client.V1Lease) -> Sighting:
        """Convert a Lease; one that another program created has no holder."""
        spec, metadata = lease.spec, lease.metadata
        if metadata is None or metadata.resource_version is None:
            raise RegisterError(f"lease {self._namespace}/{self._name} has no version")
        annotations = metadata.annotations or {}
        renewals = annotations.get(_RENEWALS, "")
        record = LeaseRecord(
            holder=(spec.holder_identity if spec else None) or "",
            address=annotations.get(_ADDRESS, ""),
            term=max(0, (spec.lease_transitions if spec else None) or 0),
            renewals=int(renewals) if renewals.isdecimal() and len(renewals) <= 16 else 0,
            duration_s=float(max(1, (spec.lease_duration_seconds if spec else None) or 1)),
        )
        return Sighting(record=record, version=metadata.resource_version)
