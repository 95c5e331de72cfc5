"""Options for several engines behind a router, and the keywords of `simulate_cluster` that they describe."""

from __future__ import annotations

from typing import Any

import click

from bstar.errors import SpecError
from bstar.interfaces.cli.params import BANDWIDTH, POSITIVE, SECONDS, apply
from bstar.interfaces.cli.sections import section

cluster_options = apply(
    click.option("--replicas", type=POSITIVE, metavar="N", help="Deployments behind a router, each of --dp engines."),
    click.option("--router", metavar="NAME",
                 help="round-robin, random, least-outstanding, least-kv, power-of-two, prefix- or session-affinity."),
    click.option("--prefill-replicas", type=POSITIVE, metavar="X", help="Engines that compute prompts only."),
    click.option("--decode-replicas", type=POSITIVE, metavar="Y", help="Engines that take over from them."),
    click.option("--decode-router", metavar="NAME", help="How those are chosen (least-outstanding)."),
    click.option("--kv-link", type=BANDWIDTH, metavar="SIZE/s", help="Between the two (the link between nodes)."),
    click.option("--kv-layerwise", is_flag=True, default=None, help="Layers are sent while the prompt is computed."),
    click.option("--autoscale", metavar="TEXT", help="concurrency=20,min=1,max=8,interval=15 or kv=0.8,…"),
    click.option("--startup", type=SECONDS, metavar="T", help="Until a new engine takes requests."),
    click.option("--fail", multiple=True, metavar="I@T[+D]", help="Engine I fails at T, and starts again D later."),
    click.option("--drain", multiple=True, metavar="I@T", help="Engine I takes no more requests from T on."),
)
_KEYS = ("replicas", "router", "prefill_replicas", "decode_replicas", "decode_router", "kv_link", "kv_layerwise",
         "autoscale", "startup", "fail", "drain")
section("Several engines", *_KEYS)


def take_cluster(options: dict[str, Any]) -> dict[str, Any] | None:
    """Keywords of `simulate_cluster` from the options (removed from `options`); None for one engine alone.

    Raises SpecError where they contradict each other.
    """
    given = {key: value for key in _KEYS if (value := options.pop(key, None)) not in (None, ())}
    if not given:
        return None
    from bstar.sim.cluster.fleet import parse_autoscaler, parse_drain, parse_failure

    pools = [key for key in ("prefill_replicas", "decode_replicas") if key in given]
    if len(pools) == 1:
        raise SpecError("--prefill-replicas: separate pools need both --prefill-replicas and --decode-replicas")
    if pools and "replicas" in given:
        raise SpecError("--replicas: separate pools have --prefill-replicas and --decode-replicas of their own")
    for key in ("kv_link", "kv_layerwise", "decode_router"):
        if key in given and not pools:
            raise SpecError(f"--{key.replace('_', '-')}: is for separate pools; give --prefill-replicas and "
                            "--decode-replicas")
    found = {key: given[key] for key in ("replicas", "router", *pools, "decode_router") if key in given}
    if "autoscale" in given:
        found["autoscaler"] = parse_autoscaler(given["autoscale"])
    if "startup" in given:
        found["startup_s"] = given["startup"]
    if "fail" in given:
        found["failures"] = tuple(parse_failure(text) for text in given["fail"])
    back = any(failure.back_s is not None for failure in found.get("failures", ()))
    if "startup" in given and "autoscale" not in given and not back:
        raise SpecError("--startup: is for engines that start later; give --autoscale, or --fail I@T+D")
    if "drain" in given:
        found["drains"] = tuple(parse_drain(text) for text in given["drain"])
    if "kv_link" in given or "kv_layerwise" in given:
        found["kv_link"] = (given.get("kv_link"), bool(given.get("kv_layerwise")))
    return found


def linked(keywords: dict[str, Any], deployment: Any) -> dict[str, Any]:
    """The keywords with their link: the given bandwidth, or that between the deployment's nodes."""
    if "kv_link" not in keywords:
        return keywords
    from bstar.sim.cluster.transfer import KvLink, link_of

    bandwidth, layerwise = keywords["kv_link"]
    if bandwidth is None:
        return keywords | {"kv_link": link_of(deployment, layerwise=layerwise)}
    return keywords | {"kv_link": KvLink(bandwidth_bytes_per_s=bandwidth, layerwise=layerwise)}
