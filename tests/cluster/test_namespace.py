"""On anybody's cluster the tests touch nothing but a namespace of their own, and leave nothing."""

import pytest

from tests.support.clusters import NAMESPACE, AnyCluster


class RecordedCluster(AnyCluster):
    """Runs nothing; `answers` are what the first words of a command print."""

    def __init__(self, answers):
        super().__init__()
        self.commands = []
        self._answers = answers

    def _run(self, program, *arguments, timeout_s, text=None):
        words = [program, *(word for word in arguments if word not in ("-n", NAMESPACE))]
        self.commands.append(" ".join(words[:3]))
        return self._answers.get(" ".join(words[:2]), "")


def test_a_namespace_that_exists_is_left_alone():
    cluster = RecordedCluster({"kubectl get": f"namespace/{NAMESPACE}\n"})
    with pytest.raises(pytest.fail.Exception, match="overwrite"), cluster.own_namespace():
        pass
    assert cluster.commands == ["kubectl get namespace"]


def test_releases_and_the_namespace_are_removed_after_a_failure_too():
    cluster = RecordedCluster({"helm list": "readers\nwriters\n"})
    with pytest.raises(KeyError), cluster.own_namespace():
        raise KeyError("a test's fixture failed")
    assert cluster.commands[-3:] == [
        "helm uninstall readers",
        "helm uninstall writers",
        "kubectl delete namespace",
    ]
