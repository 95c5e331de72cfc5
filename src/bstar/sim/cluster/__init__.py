"""Many engines behind a router: replicas, autoscaling, failures, and separate pools for prefill and decode.

    from bstar.sim.cluster import simulate_cluster
    simulate_cluster(deployment, traffic, replicas=4, router="least-outstanding")
"""

from bstar.sim.cluster.fleet import Autoscaler, Drain, Failure
from bstar.sim.cluster.routers import ROUTERS
from bstar.sim.cluster.run import ClusterResult, simulate_cluster
from bstar.sim.cluster.transfer import KvLink

__all__ = ["ROUTERS", "Autoscaler", "ClusterResult", "Drain", "Failure", "KvLink", "simulate_cluster"]
