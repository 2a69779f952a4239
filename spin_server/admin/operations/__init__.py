"""What can be done to the documents: each makes the changes of one operation from a state.

An operation is a function of the state, so that it can be tried (dry run), tried again after
somebody else wrote first, and put beside others in one commit.
"""

from spin_server.admin.operations.base import (
    Operation,
    edit,
    etag,
    matches,
    require_match,
    set_body,
    together,
    visible,
)
from spin_server.admin.operations.history import bodies_at, difference, restore, without_ended
from spin_server.admin.operations.keys import (
    MOST_KEYS,
    SECRET_BYTES,
    NewKey,
    create_key,
    hash_key,
    revoke_key,
    rotate_key,
)
from spin_server.admin.operations.policies import (
    begin_anew,
    expire_policies,
    patch_policy,
    require_policy,
)
from spin_server.admin.operations.tenants import (
    MOST_TENANTS,
    create_tenant,
    delete_tenant,
    patch_tenant,
    require_tenant,
)

__all__ = [
    "MOST_KEYS",
    "MOST_TENANTS",
    "SECRET_BYTES",
    "NewKey",
    "Operation",
    "begin_anew",
    "bodies_at",
    "create_key",
    "create_tenant",
    "delete_tenant",
    "difference",
    "edit",
    "etag",
    "expire_policies",
    "hash_key",
    "matches",
    "patch_policy",
    "patch_tenant",
    "require_match",
    "require_policy",
    "require_tenant",
    "restore",
    "revoke_key",
    "rotate_key",
    "set_body",
    "together",
    "visible",
    "without_ended",
]
