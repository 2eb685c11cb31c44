"""An OTLP collector: a real gRPC server that keeps the spans it is sent."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc


class Collector(pb_grpc.TraceServiceServicer):
    """Within a `with`, at `endpoint`; `spans` are all that were exported so far."""

    def __init__(self, host="127.0.0.1"):
        self._arrived = threading.Condition()
        self._spans = []
        self._server = grpc.server(ThreadPoolExecutor(4))
        pb_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"{host}:0")
        self.endpoint = f"http://{host}:{port}"

    def __enter__(self):
        self._server.start()
        return self

    def __exit__(self, *_):
        self._server.stop(None).wait(10)

    def Export(self, request, context):  # noqa: N802 - named by the contract
        with self._arrived:
            for of_process in request.resource_spans:
                resource = _plain(of_process.resource.attributes)
                self._spans += [
                    Span(span, resource) for scope in of_process.scope_spans for span in scope.spans
                ]
            self._arrived.notify_all()
        return pb.ExportTraceServiceResponse()

    @property
    def spans(self):
        with self._arrived:
            return list(self._spans)

    def until(self, condition, *, timeout_s=120.0):
        """All spans as soon as `condition` of them holds."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: condition(self._spans), timeout_s)
            return list(self._spans)


class Span:
    """A span as the collector got it."""

    def __init__(self, span, resource):
        self.name = span.name
        self.trace, self.id, self.parent = span.trace_id, span.span_id, span.parent_span_id
        self.began_ns, self.ended_ns = span.start_time_unix_nano, span.end_time_unix_nano
        self.attributes = _plain(span.attributes)
        self.fault = span.status.message
        self.service = resource["service.name"]


def _plain(attributes):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
