"""host:port: what is accepted, and what the error says."""

import pytest

from equipoise.settings.address import Address, dial_address, listen_address, parse_address
from equipoise.settings.errors import InvalidSettingsError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7070", "127.0.0.1", 7070),
        ("balancer-0.eq:0", "balancer-0.eq", 0),
        ("[::1]:65535", "[::1]", 65535),
        ("[fe80::1%eth0]:1", "[fe80::1%eth0]", 1),
    ],
)
def test_an_address_is_split_at_its_last_colon_and_joined_again(text, host, port):
    assert parse_address(text) == Address(host, port)
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "7070", ":7070", "host:", "host:x", "host:65536", "host:٣", "two words:1", "h:-1"),
        *("höst:1", "語:1"),
    ],
)
def test_anything_else_is_an_error_that_shows_the_value(text):
    with pytest.raises(ValueError, match=r"must be host:port with a port from 0 to 65535, not '"):
        parse_address(text)


def test_a_long_value_is_shortened_in_the_error():
    with pytest.raises(ValueError, match="…") as raised:
        parse_address("x" * 10_000)
    assert len(str(raised.value)) < 150


def test_port_0_can_be_listened_on_but_not_dialled():
    assert listen_address("listen", "h:0").port == 0
    words = "balancer must be host:port with a port from 1 to 65535, not 'h:0'"
    with pytest.raises(InvalidSettingsError, match=words):
        dial_address("balancer", "h:0")


def test_brackets_are_removed_for_sockets():
    assert parse_address("[::1]:1").bare_host == "::1"
