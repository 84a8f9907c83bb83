"""Checks the manifests in a file against the schemas of Kubernetes, unknown fields included, and against each other."""

import sys

import kubernetes_validate
import yaml

# Kinds of the Prometheus operator, which Kubernetes has no schema of: the fields that we use, of its API reference.
MONITOR = {"jobLabel", "selector", "namespaceSelector", "attachMetadata", "endpoints"}
ENDPOINT = {"port", "path", "scheme", "interval", "scrapeTimeout", "authorization", "tlsConfig", "relabelings"}

objects = [found for found in yaml.safe_load_all(open(sys.argv[1])) if found]
kinds = {found["kind"]: found for found in objects}
for found in objects:
    if found["apiVersion"].startswith("monitoring.coreos.com/"):
        continue
    kubernetes_validate.validate(found, "1.30", strict=True)
daemons = kinds["DaemonSet"]
pod = daemons["spec"]["template"]
labels = pod["metadata"]["labels"].items()
assert daemons["spec"]["selector"]["matchLabels"].items() <= labels, "the DaemonSet does not select its pods"
assert kinds["Service"]["spec"]["selector"].items() <= labels, "the Service does not select the pods"
volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
mounts = {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
assert volumes == mounts, f"volumes {volumes}, mounted {mounts}"
if monitor := kinds.get("ServiceMonitor"):
    assert set(monitor["spec"]) <= MONITOR and all(set(end) <= ENDPOINT for end in monitor["spec"]["endpoints"])
    selected = monitor["spec"]["selector"]["matchLabels"]
    assert selected.items() <= kinds["Service"]["metadata"]["labels"].items(), "the ServiceMonitor does not select the Service"
    ports = {port["name"] for port in kinds["Service"]["spec"]["ports"]}
    assert all(end["port"] in ports for end in monitor["spec"]["endpoints"]), "the ServiceMonitor names no port of the Service"
if rules := kinds.get("PrometheusRule"):
    assert len(rules["spec"]["groups"][0]["rules"]) > 5, "the rules are not in the PrometheusRule"
