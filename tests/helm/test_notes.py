"""What helm prints after an installation."""

from tests.support.helm_chart import CHART, helm_command


def notes(*values):
    arguments = [part for value in values for part in ("--set", value)]
    printed = helm_command("install", "eq", CHART, "-n", "moe", "--dry-run=client", *arguments)
    return printed.partition("\nNOTES:\n")[2]


def test_a_second_release_names_a_command_that_reaches_the_balancer():
    address = "balancer.externalAddress=first-balancer.fleet.svc:7171"
    text = notes("balancer.enabled=false", address, "pool=decode")
    assert "kubectl -n fleet port-forward svc/first-balancer 7070:7171 &" in text
    assert "equipoise status --watch --address=127.0.0.1:7070 --pool='decode'" in text
    assert "policy" not in text


def test_each_command_fits_what_is_installed():
    text = notes("gateway.apiKeys.existingSecret.name=keys", "worker.checkpoint.path=/models/v3")
    assert "kubectl -n moe exec -it deploy/eq-equipoise-balancer -- equipoise status" in text
    assert "kubectl -n moe port-forward deploy/eq-equipoise-balancer 7080\n" in text
    assert '-H "authorization: Bearer $OPENAI_API_KEY" -d \'{"model": "v3"' in text
    assert "nonsense" not in text
    assert "nonsense" in notes()
    assert "authorization" not in notes()
    bare = notes("gateway.enabled=false", "tests.enabled=false")
    assert "8080" not in bare
    assert "helm -n moe test" not in bare


def test_two_pools_say_how_to_check_handovers():
    text = notes("phase=decode", "pool=writers", "prefillPool=readers", "peerPools={readers}")
    assert 'Pool "readers" prefills prompts for pool "writers"' in text
    assert "`helm test` sends a prompt that must be handed over." in text
    # Without a gateway, `helm test` sends no prompt.
    assert "handed over" not in notes("prefillPool=p", "peerPools={p}", "gateway.enabled=false")
    text = notes("phase=prefill", "pool=readers", "peerPools={writers}")
    assert 'Pool "readers" prefills prompts for pool writers.' in text
    assert "needs prefillPool=readers and peerPools={readers}." in text
    assert "list decode pools in peerPools" in notes("phase=prefill")
    assert "prefillPool" not in notes()


def test_it_says_where_the_policy_is():
    assert "Helm 3 undoes edits of ConfigMap eq-equipoise-policy" in notes()
    assert "in ConfigMap mine: edit it at any time" in notes("policy.existingConfigMap=mine")


def test_alerts_without_a_monitor_say_which_labels_they_select():
    rule = "metrics.prometheusRule.enabled=true"
    assert "must add the labels namespace=moe and release=eq" in notes(rule)
    assert "must add the labels" not in notes(rule, "metrics.podMonitor.enabled=true") + notes()


def test_it_says_what_protects_the_traffic_between_pods():
    assert "plain text with each other, protected by the NetworkPolicy only." in notes()
    tokens = "tokens.existingSecret.name=tokens"
    machines = "networkPolicy.balancerFrom[0].ipBlock.cidr=10.0.0.0/16"
    text = notes("worker.hostNetwork=true", tokens, machines)
    assert "plain text with each other.\n" in text
    assert "admit only the machines of this fleet to ports 7071 and 7072" in text
    assert "firewall" not in notes()


def test_it_asks_for_a_full_pool_before_an_upgrade_that_replaces_ranks_one_by_one():
    text = notes()
    assert "Upgrades replace one rank at a time" in text
    assert "check with `equipoise status` that none is missing" in text
    assert "none is missing" not in notes("worker.slotsPerRank=8")


def test_a_leader_worker_set_is_not_upgraded_rank_by_rank():
    text = notes("worker.kind=LeaderWorkerSet")
    assert "Upgrades replace all ranks at once" in text
    assert "one rank at a time" not in text
