"""Some of `tests/benchmarks/hostile_media.py`: nothing hostile is more than one line, or reaches what it must not."""

from __future__ import annotations

import asyncio
from itertools import islice

from hostile_images import PRIVATE, addresses, data_urls, images
from media_network import PUBLIC, Names, RecordedNetwork, response, serving

from dovetail_server.media.addresses import AllowedDomains, MediaUrl, is_public, parse_url
from dovetail_server.media.decode import decoded
from dovetail_server.media.fetch import Fetcher
from dovetail_server.media.refusals import MediaError
from dovetail_server.media.sources import data_of

NUM_ADDRESSES, NUM_IMAGES = 2000, 300


def check_line(error: MediaError) -> None:
    assert error.message
    assert "\n" not in error.message
    assert "\r" not in error.message
    assert "\0" not in error.message
    assert len(error.message) < 500


def hosts_of(urls: list[str]) -> set[str]:
    found = set()
    for url in urls:
        try:
            parts: MediaUrl = parse_url(url)
        except MediaError:
            continue
        found.add(parts.host)
    return found


def test_addresses() -> None:
    """Whatever a URL says, and wherever its host's name and redirects lead, only public addresses are connected to."""
    urls = list(islice(addresses(1), NUM_ADDRESSES))
    hosts = sorted(hosts_of(urls))
    assert len(hosts) > 5
    targets = iter(urls)

    def answer(head: bytes) -> bytes:
        return response(status="302 Found", location=next(targets, "/").encode("ascii", "ignore").decode())

    async def run() -> tuple[list[bytes | MediaError], RecordedNetwork]:
        # Each name answers with what it says where it is an address, and else with a private one behind a public one.
        names = Names(
            {host: [host] if host[0].isdigit() or ":" in host else [[PUBLIC], [PRIVATE[0]]] for host in hosts}
        )
        async with serving(answer) as port:
            network = RecordedNetwork(port)
            network.dead = {443}  # the server speaks no TLS
            fetcher = Fetcher(AllowedDomains(["*"]), resolver=names, network=network, timeout_s=60)
            return await fetcher.fetch_all(urls), network

    found, network = asyncio.run(run())
    assert network.connected
    assert all(is_public(address) and port in (80, 443) for address, port in network.connected)
    for each in found:
        assert isinstance(each, MediaError)
        check_line(each)


def test_images() -> None:
    """Each is an image, or one line."""
    num_whole = 0
    for data in islice(images(1), NUM_IMAGES):
        try:
            image = decoded(data)
        except MediaError as error:
            check_line(error)
        else:
            num_whole += 1
            assert image.mode == "RGB"
    assert 0 < num_whole < NUM_IMAGES


def test_data_urls() -> None:
    """Each is bytes, whatever it says that they are, or one line."""
    num_read = 0
    for url in islice(data_urls(1), NUM_IMAGES):
        try:
            num_read += bool(data_of(url))
        except MediaError as error:
            check_line(error)
    assert 0 < num_read < NUM_IMAGES


def test_private_addresses_are_private() -> None:
    """The list that the others use."""
    assert not any(map(is_public, PRIVATE))
