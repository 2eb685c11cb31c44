"""A gRPC client without stubs: it learns services by reflection, as grpcurl does."""

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from equipoise.trust.credentials import Credentials
from equipoise.trust.settings import Tls


def call(address, method, *, timeout_s=5.0, credentials=None, **request):
    """Call `package.Service/Method` with these fields; returns the answer as plain values.

    `credentials` say who asks, `Credentials()` in plain text unless given.

    Raises:
        grpc.RpcError: the server does not answer, or rejects the call.
    """
    service_name, _, method_name = method.partition("/")
    with (credentials or Credentials(Tls(insecure=True))).blocking_channel(address) as channel:
        grpc.channel_ready_future(channel).result(timeout=timeout_s)
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        known = pool.FindServiceByName(service_name).FindMethodByName(method_name)
        answer = channel.unary_unary(
            f"/{method}",
            request_serializer=GetMessageClass(known.input_type).SerializeToString,
            response_deserializer=GetMessageClass(known.output_type).FromString,
        )(GetMessageClass(known.input_type)(**request), timeout=timeout_s)
        return MessageToDict(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
