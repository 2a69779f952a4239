"""One ConfigMap and one Secret of the same name, over the official client."""

import base64
import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from spin_server.admin.store.interface import StoreError
from spin_server.errors import InputError

ObjectKind = Literal["config_map", "secret"]
_SHOWN: dict[ObjectKind, str] = {"config_map": "ConfigMap", "secret": "Secret"}
# The last three: an answer that is none of Kubernetes', such as a proxy's page.
_FAILURES = (ApiException, HTTPError, ValueError, TypeError, AttributeError)
_TIMEOUT = (3.0, 5.0)  # seconds to connect, and between two bytes of an answer


class ChangedError(StoreError):
    """The object has changed since it was read; nothing was written."""


class RejectedError(StoreError):
    """The API server said no; nothing was written."""


class BusyError(RejectedError):
    """The API server has too much to do; nothing was written."""


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
        # The client reads a kubeconfig without looking: what is wrong with it raises anything.
        except Exception as error:
            raise InputError(
                "--admin-store",
                "a pod's service account or a kubeconfig",
                _one_line(f"{type(error).__name__}: {error}"),
            ) from None
        # A write that is sent twice by itself would meet its own conflict.
        configuration.retries = False
        self._api = client.CoreV1Api(client.ApiClient(configuration))
        self._watching: watch.Watch | None = None

    def shown(self, kind: ObjectKind) -> str:
        """Say which object is meant."""
        return f"{_SHOWN[kind]} {self.namespace}/{self.name}"

    def get(self, kind: ObjectKind) -> Stored | None:
        """Read an object at its newest; None if there is none."""
        try:
            return self._call("read", kind, self.name, self.namespace)
        except RejectedError as error:
            if isinstance(error.__cause__, ApiException) and error.__cause__.status == 404:
                return None
            raise

    def create(self, kind: ObjectKind) -> None:
        """Make an object without data, unless it exists."""
        metadata = client.V1ObjectMeta(name=self.name, namespace=self.namespace)
        kinds = {"config_map": client.V1ConfigMap, "secret": client.V1Secret}
        try:
            self._call("create", kind, self.namespace, kinds[kind](metadata=metadata))
        except ChangedError:
            return

    def replace(self, kind: ObjectKind, found: Stored, data: Mapping[str, bytes]) -> Stored:
        """Write all of an object's data, if it is still as it was found.

        Raises:
            ChangedError: it is not.
            RejectedError: the API server refuses; nothing was written.
            UnansweredError: it may have been written.
        """
        whole = copy.copy(found.whole)
        whole.data = {
            name: base64.b64encode(value).decode() if kind == "secret" else value.decode()
            for name, value in data.items()
        }
        return self._call("replace", kind, self.name, self.namespace, whole)

    def changes(self, seconds: int) -> Iterator[str]:
        """Watch the ConfigMap for a while; yields its version now, and those that follow.

        Raises:
            StoreError: the watch ended before its time.
        """
        self._watching = watch.Watch(return_type="V1ConfigMap")
        try:
            # From no version: the API server no longer knows an old one, as that of an object that
            # nobody writes soon is.
            for event in self._watching.stream(
                self._api.list_namespaced_config_map,
                self.namespace,
                field_selector=f"metadata.name={self.name}",
                timeout_seconds=seconds,
                _request_timeout=(_TIMEOUT[0], seconds + _TIMEOUT[1]),
            ):
                yield event["object"].metadata.resource_version
        except _FAILURES as error:
            raise self._explained("watch", "config_map", error) from error

    def close(self) -> None:
        """End a watch that another thread waits for."""
        if self._watching is not None:
            self._watching.stop()

    def _call(self, verb: str, kind: ObjectKind, *arguments: Any) -> Stored:
        method = getattr(self._api, f"{verb}_namespaced_{kind}")
        try:
            return _stored(method(*arguments, _request_timeout=_TIMEOUT))
        except _FAILURES as error:
            raise self._explained(verb, kind, error) from error

    def _explained(self, verb: str, kind: ObjectKind, error: Exception) -> StoreError:
        what = f"Kubernetes: {verb} {self.shown(kind)}: expected it to be done, got "
        if not isinstance(error, ApiException) or not error.status:
            return UnansweredError(what + f"{type(error).__name__}: {_one_line(str(error))}")
        said = what + f"{error.status} {_one_line(error.reason or '')}{_message(error)}"
        if error.status == 409:
            return ChangedError(said)
        if error.status == 429:
            return BusyError(said)
        if error.status == 408 or error.status >= 500:
            return UnansweredError(said)
        return RejectedError(said)


def _message(error: ApiException) -> str:
    """Get what the API server said besides its status, such as a quota's or a webhook's reason."""
    try:
        message = json.loads(error.body)["message"]
    except (ValueError, TypeError, LookupError):
        return ""
    return f": {_one_line(str(message))}"


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
