"""Names, addresses and ports inside the node.

They are constants: each node has a network namespace of its own, so that several nodes never meet.
"""

from __future__ import annotations

NODE = "node1"
CLUSTER_DOMAIN = "cluster.local"
LOOPBACK = "127.0.0.1"

NODE_IP = "10.77.0.1"
NODE_PREFIX = 24
#: A default route has to exist for service addresses to be routable; nothing answers at this gateway.
NOWHERE = "10.77.0.254"
POD_NETWORK = "10.77.1.0/24"
SERVICE_NETWORK = "10.96.0.0/16"
API_SERVICE_IP = "10.96.0.1"

API_PORT = 6443
ETCD_PORT = 2379
ETCD_PEER_PORT = 2380
DNS_HEALTH_PORT = 8081
DNS_READY_PORT = 8181

PAUSE_IMAGE = "localhost/outrider-pause:1"
#: Where every container finds the project's third-party Python packages.
ENVIRONMENT_MOUNT = "/opt/outrider/environment"
