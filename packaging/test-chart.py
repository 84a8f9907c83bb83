"""Checks the manifests in FILE against the schemas of Kubernetes, unknown fields included, and against each other and the systemd unit; then
starts PROGRAM in ROOT, an unpacked image, with the files that the pod mounts, and probes it as a kubelet and Prometheus do. Expects
namespaces of its own for network and mounts, and ROOT as a mount point.

test-chart.py FILE ROOT PROGRAM UNIT"""

import base64
import pathlib
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request

import kubernetes_validate
import yaml

# The oldest version that the chart permits, and the newest with schemas.
VERSIONS = ("1.27", kubernetes_validate.latest_version())
# Kinds of the Prometheus operator, which Kubernetes has no schema of: the fields that we use, of its API reference.
MONITOR = {"selector", "namespaceSelector", "attachMetadata", "endpoints"}
ENDPOINT = {"port", "path", "scheme", "interval", "scrapeTimeout", "authorization", "tlsConfig", "relabelings"}

manifests, root, program, unit = (pathlib.Path(word) for word in sys.argv[1:])
objects = [found for found in yaml.safe_load_all(manifests.read_text()) if found]
kinds = {found["kind"]: found for found in objects}
for found in objects:
    if found["apiVersion"].startswith("monitoring.coreos.com/"):
        continue
    for version in VERSIONS:
        kubernetes_validate.validate(found, version, strict=True)
daemons = kinds["DaemonSet"]
pod = daemons["spec"]["template"]
labels = pod["metadata"]["labels"].items()
assert daemons["spec"]["selector"]["matchLabels"].items() <= labels, "the DaemonSet does not select its pods"
assert kinds["Service"]["spec"]["selector"].items() <= labels, "the Service does not select the pods"

# What tracing processes of other pods needs.
(container,) = pod["spec"]["containers"]
context = container["securityContext"]
node = next(variable["name"] for variable in container["env"] if variable["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName")
assert container["args"] == ["--host-name", f"$({node})"], "hosts are not called as their nodes"
assert pod["spec"]["hostPID"] is True, "the pod does not see the node's processes"
assert context["runAsUser"] == 0, "the daemon does not run as root"
if not context["privileged"]:
    capabilities = re.search(r"^CapabilityBoundingSet=(.*)$", unit.read_text(), re.M).group(1).replace("CAP_", "").split()
    assert set(context["capabilities"]["add"]) == set(capabilities), "other capabilities than the systemd unit"
    assert context["seccompProfile"]["type"] == "Unconfined", "a seccomp profile that refuses userfaultfd"

# Volumes: a Secret that is not the chart's own is the administrator's.
volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
assert set(volumes) == set(mounts), f"volumes {set(volumes)}, mounted {set(mounts)}"
writable = {mount["mountPath"] for mount in mounts.values() if not mount.get("readOnly")}
cgroups = mounts["cgroups"]["mountPath"]
assert cgroups == volumes["cgroups"]["hostPath"]["path"] == "/sys/fs/cgroup", "the pod does not see the node's control groups"
assert writable - {cgroups} == {"/run/plimsoll", "/tmp", "/var/lib/plimsoll"}, f"writable: {writable}"
assert (cgroups in writable) == context["privileged"], "the node's control groups can be changed by the pod, or not by a privileged one"
token = b"token-of-the-administrator"
for name, volume in volumes.items():
    files, mode = {}, 0o644
    if "configMap" in volume:
        assert volume["configMap"]["name"] == kinds["ConfigMap"]["metadata"]["name"], "the pod mounts no ConfigMap of the chart"
        files = {file: text.encode() for file, text in kinds["ConfigMap"]["data"].items()}
    elif name == "token":
        secret = kinds.get("Secret")
        if secret and secret["metadata"]["name"] == volume["secret"]["secretName"]:
            token = base64.b64decode(secret["data"]["token"])
        files, mode = {"token": token}, volume["secret"]["defaultMode"]
    directory = root / mounts[name]["mountPath"].lstrip("/")
    if not files:
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", directory], check=True)
        continue
    # As a kubelet lays them out: links to a directory that is replaced as a whole, in one that everybody may write.
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "..1").mkdir(parents=True)
    directory.chmod(0o1777)
    (directory / "..data").symlink_to("..1")
    for file, content in files.items():
        (directory / "..1" / file).write_bytes(content)
        (directory / "..1" / file).chmod(mode)
        (directory / file).symlink_to(f"..data/{file}")

if context["readOnlyRootFilesystem"]:
    subprocess.run(["mount", "-o", "remount,bind,ro", root], check=True)

ports = {port["name"]: port["containerPort"] for port in container["ports"]}
probe = container["livenessProbe"]["httpGet"]
assert container["readinessProbe"]["httpGet"] == probe, "the probes differ"
for port in kinds["Service"]["spec"]["ports"]:
    assert port["targetPort"] in ports, f"the Service names no port of the pod: {port['targetPort']}"

if monitor := kinds.get("ServiceMonitor"):
    assert set(monitor["spec"]) <= MONITOR and all(set(end) <= ENDPOINT for end in monitor["spec"]["endpoints"])
    selected = monitor["spec"]["selector"]["matchLabels"]
    assert selected.items() <= kinds["Service"]["metadata"]["labels"].items(), "the ServiceMonitor does not select the Service"
    names = {port["name"] for port in kinds["Service"]["spec"]["ports"]}
    for end in monitor["spec"]["endpoints"]:
        assert end["port"] in names, "the ServiceMonitor names no port of the Service"
        credentials = end["authorization"]["credentials"]
        assert credentials["name"] == volumes["token"]["secret"]["secretName"], "the ServiceMonitor sends another token"
        assert end["scheme"].upper() == probe.get("scheme", "HTTP"), "the ServiceMonitor's scheme is not that of the probes"
if rules := kinds.get("PrometheusRule"):
    assert len(rules["spec"]["groups"][0]["rules"]) > 5, "the rules are not in the PrometheusRule"


def status(path, **headers):
    """The status and body of an answer; status 0 without one."""
    request = urllib.request.Request(f"http://127.0.0.1:{ports[probe['port']]}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


daemon = subprocess.Popen(["chroot", root, program, "--log", "warn"])
try:
    end = time.monotonic() + 10
    while status(probe["path"])[0] != 200:
        assert daemon.poll() is None, f"the daemon ended with exit code {daemon.returncode}"
        assert time.monotonic() < end, f"the probe gets {status(probe['path'])}"
        time.sleep(0.1)
    assert status("/metrics")[0] == 401, f"metrics without a token: {status('/metrics')}"
    code, text = status("/metrics", Authorization=f"Bearer {token.decode()}")
    assert code == 200 and text.endswith(b"# EOF\n"), f"metrics: {code}"
finally:
    daemon.terminate()
assert daemon.wait(30) == 0, f"the daemon ends with exit code {daemon.returncode}"
