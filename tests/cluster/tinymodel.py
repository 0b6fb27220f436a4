"""A SpeculativeModel that really serves: a tiny random model on a volume of the node, ready in about 20 s."""

from __future__ import annotations

from cluster.operated import SMALL, Object, Operated, model, volume
from serving.tiny import make_tiny_model


def tiny_model(operated: Operated, name: str, volume_name: str = "weights") -> Object:
    """The resource, not yet applied, whose weights and volume are there."""
    directory = operated.cluster.settings.state / volume_name
    make_tiny_model(directory / "tiny", context_length=512)
    for path in (directory, *directory.rglob("*")):  # the pod's user is not the one who runs the tests
        path.chmod(0o755 if path.is_dir() else 0o644)
    operated.apply(*volume(volume_name, directory, operated.namespace))
    claim = {"name": "weights", "mountPath": "/models", "persistentVolumeClaim": {"claimName": volume_name}}
    tiny = {
        "source": {"path": "/models/tiny"},
        "dtype": "float32",
        "contextLength": 256,
        "servedName": "tiny",
    }
    ngram = {"method": "ngram", "ngram": {"maxMatch": 3}}
    return model(name, model=tiny, engine={"resources": SMALL, "volumes": [claim]}, proposer=ngram)
