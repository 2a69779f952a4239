"""One ConfigMap and one Secret of the same name, over the official client."""

import base64
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from spin_server.admin.store.interface import StoreError
from spin_server.errors import InputError

Kind = Literal["config_map", "secret"]
_SHOWN: dict[Kind, str] = {"config_map": "ConfigMap", "secret": "Secret"}
_TIMEOUT = (3.0, 10.0)  # seconds to connect, and between two bytes of an answer


class ConflictError(StoreError):
    """The object has changed since it was read; nothing was written."""


class RejectedError(StoreError):
    """The API server said no; nothing was written."""


class UnansweredError(StoreError):
    """No answer, or none that says what happened; a write may have been carried out."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as the API server has it.

    Args:
        version: its resourceVersion; opaque.
        data: a Secret's, decoded.
        whole: the client's object, which keeps what others put on it, such as labels.
    """

    version: str
    data: Mapping[str, bytes]
    whole: Any


class Cluster:
    """The two objects of a store.

    Args:
        namespace, name: where they are.
        kubeconfig: how to reach the API server; None: the pod's service account, or else the
            user's own kubeconfig.

    Raises:
        InputError: there is no way to an API server.
    """

    def __init__(self, namespace: str, name: str, kubeconfig: str | None = None) -> None:
        self.namespace, self.name = namespace, name
        configuration = client.Configuration()
        try:
            _find_a_way(configuration, kubeconfig)
        except (ConfigException, OSError) as error:
            raise InputError(
                "--admin-store", "a pod's service account or a kubeconfig", error
            ) from None
        # A write that is sent twice by itself would meet its own conflict.
        configuration.retries = False
        self._api = client.CoreV1Api(client.ApiClient(configuration))
        self._watching: watch.Watch | None = None

    def shown(self, kind: Kind) -> str:
        """Say which object is meant."""
        return f"{_SHOWN[kind]} {self.namespace}/{self.name}"

    def get(self, kind: Kind) -> Stored | None:
        """Read an object at its newest; None if there is none."""
        try:
            return _stored(self._call("read", kind, self.name, self.namespace))
        except RejectedError as error:
            if isinstance(error.__cause__, ApiException) and error.__cause__.status == 404:
                return None
            raise

    def create(self, kind: Kind) -> None:
        """Make an object without data, unless it exists."""
        metadata = client.V1ObjectMeta(name=self.name, namespace=self.namespace)
        kinds = {"config_map": client.V1ConfigMap, "secret": client.V1Secret}
        try:
            self._call("create", kind, self.namespace, kinds[kind](metadata=metadata))
        except ConflictError:
            return

    def replace(self, kind: Kind, found: Stored, data: Mapping[str, bytes]) -> Stored:
        """Write all of an object's data, if it is still as it was found.

        Raises:
            ConflictError: it is not.
            RejectedError: the API server refuses; nothing was written.
            UnansweredError: it may have been written.
        """
        whole = copy.copy(found.whole)
        whole.data = {
            name: base64.b64encode(value).decode() if kind == "secret" else value.decode()
            for name, value in data.items()
        }
        return _stored(self._call("replace", kind, self.name, self.namespace, whole))

    def changes(self, version: str, seconds: int) -> Iterator[str]:
        """Wait for changes of the ConfigMap after a version; yields the versions that follow.

        Raises:
            StoreError: the watch ended before its time.
        """
        self._watching = watch.Watch(return_type="V1ConfigMap")
        try:
            for event in self._watching.stream(
                self._api.list_namespaced_config_map,
                self.namespace,
                field_selector=f"metadata.name={self.name}",
                resource_version=version,
                timeout_seconds=seconds,
                _request_timeout=(_TIMEOUT[0], seconds + _TIMEOUT[1]),
            ):
                yield event["object"].metadata.resource_version
        except (ApiException, HTTPError) as error:
            raise self._explained("watch", "config_map", error) from error

    def close(self) -> None:
        """End a watch that another thread waits for."""
        if self._watching is not None:
            self._watching.stop()

    def _call(self, verb: str, kind: Kind, *arguments: Any) -> Any:
        method = getattr(self._api, f"{verb}_namespaced_{kind}")
        try:
            return method(*arguments, _request_timeout=_TIMEOUT)
        except (ApiException, HTTPError) as error:
            raise self._explained(verb, kind, error) from error

    def _explained(self, verb: str, kind: Kind, error: Exception) -> StoreError:
        what = f"Kubernetes: {verb} {self.shown(kind)}: expected it to be done, got "
        if not isinstance(error, ApiException) or not error.status:
            return UnansweredError(what + f"{type(error).__name__}: {_one_line(str(error))}")
        said = what + f"{error.status} {_one_line(error.reason or '')}"
        if error.status == 409:
            return ConflictError(said)
        return RejectedError(said) if error.status < 500 else UnansweredError(said)


def _find_a_way(configuration: Any, kubeconfig: str | None) -> None:
    if kubeconfig is None:
        try:
            config.load_incluster_config(client_configuration=configuration)
            return
        except ConfigException:  # not in a pod
            pass
    config.load_kube_config(kubeconfig, client_configuration=configuration, persist_config=False)


def _stored(whole: Any) -> Stored:
    data = whole.data or {}
    if isinstance(whole, client.V1Secret):
        values = {name: base64.b64decode(value or "") for name, value in data.items()}
    else:
        values = {name: value.encode() for name, value in data.items()}
    return Stored(whole.metadata.resource_version, values, whole)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
