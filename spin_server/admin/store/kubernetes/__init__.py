"""The store of servers on Kubernetes: one ConfigMap for what may be read, one Secret for keys.

`objects` talks to the API server, `layout` says what is in the two objects, `store` commits to both
as if they were one and watches them, `first_key` shows the key of the first start.
"""

from spin_server.admin.store.kubernetes.first_key import SecretEntry
from spin_server.admin.store.kubernetes.objects import Cluster
from spin_server.admin.store.kubernetes.store import KubernetesStore

__all__ = ["Cluster", "KubernetesStore", "SecretEntry"]
