{{- define "tideway.name" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) -}}
{{- $name | trunc 40 | replace "." "-" | trimSuffix "-" }}
{{- end }}

{{/* Of a component, by (dict "root" $ "component" "gateway"): what its pods are selected by. */}}
{{- define "tideway.selector" -}}
app.kubernetes.io/name: tideway
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Of pods: nothing that changes with each version of the chart, else every upgrade would roll all of them. */}}
{{- define "tideway.podLabels" -}}
{{ include "tideway.selector" . }}
app.kubernetes.io/part-of: tideway
{{- end }}

{{- define "tideway.labels" -}}
{{ include "tideway.selector" . }}
app.kubernetes.io/part-of: tideway
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "tideway.metadata" -}}
name: {{ include "tideway.name" .root }}-{{ .name | default .component }}
namespace: {{ .root.Release.Namespace }}
labels: {{- include "tideway.labels" . | nindent 2 }}
{{- end }}

{{/* By (dict "root" $ "name" "tideway-gateway"). */}}
{{- define "tideway.image" -}}
{{- $image := .root.Values.image -}}
{{ $image.registry }}{{ .name }}{{ with get $image.digests .name }}@{{ . }}{{ else }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "tideway.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "tideway.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "tideway.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Variables of all services. */}}
{{- define "tideway.settings" -}}
TIDEWAY_NATS_URL: {{ include "tideway.natsUrl" . }}
TIDEWAY_NATS_REPLICAS: {{ ternary 3 1 (gt (int .Values.nats.replicas) 1) | quote }}
{{- if .Values.nats.tls.enabled }}
TIDEWAY_NATS_TLS_CA: /etc/tideway/nats/ca.crt
{{- end }}
TIDEWAY_METRICS_HOST: 0.0.0.0
TIDEWAY_METRICS_PORT: "9100"
TIDEWAY_OTLP_ENDPOINT: {{ .Values.otlpEndpoint | quote }}
{{- $log := dict "TIDEWAY_LOG_LEVEL" "INFO" "TIDEWAY_LOG_FORMAT" "json" }}
{{- range $name, $value := mergeOverwrite $log .Values.settings }}
{{ $name }}: {{ $value | toString | quote }}
{{- end }}
TIDEWAY_MODELS: {{ toRawJson .Values.models.initial | quote }}
TIDEWAY_ADAPTERS: {{ with .Values.models.adapters }}{{ toRawJson . | quote }}{{ else }}""{{ end }}
{{- end }}

{{/* Annotations of a pod: they change, and so the pods roll, with what their environment is made of. */}}
{{- define "tideway.podAnnotations" -}}
{{- if ne .component "nats" }}
checksum/settings: {{ include "tideway.settings" .root | sha256sum }}
{{- end }}
{{- with .root.Values.secret.revision }}
checksum/secret: {{ . | quote }}
{{- end }}
{{- range $key, $value := mergeOverwrite (deepCopy .root.Values.podAnnotations) (.more | default dict) }}
{{ $key }}: {{ $value | quote }}
{{- end }}
{{- end }}

{{- define "tideway.placing" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "tideway.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "tideway.selector" . | nindent 8 }}
{{- end }}

{{/* Of one of Tideway's containers, by (dict "root" $ "component" "gateway" "user" "gateway" "settings" .Values.gateway.settings). */}}
{{- define "tideway.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name={{ .root.Release.Namespace }},k8s.pod.name=$(POD_NAME),k8s.pod.uid=$(POD_UID),k8s.node.name=$(NODE_NAME),k8s.container.name={{ .component }}
- {name: TIDEWAY_NATS_USER, value: {{ .user }}}
- name: TIDEWAY_NATS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secret.name }}, key: nats-{{ .user }}-password}}
{{- if has .component (list "gateway" "placement" "worker" "warm-up") }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secret.name }}, key: {{ .root.Values.models.huggingFace.tokenKey }}, optional: true}}
{{- with .root.Values.models.huggingFace.endpoint }}
- {name: HF_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- if .root.Values.models.huggingFace.offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- end }}
{{- range $name, $value := .settings }}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end }}

{{/* Mounts and volumes of one of Tideway's pods, by the same dict with "tmp", the size of /tmp. */}}
{{- define "tideway.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if has .component (list "gateway" "placement" "worker" "warm-up") }}
- {name: cache, mountPath: /cache}
{{- if .root.Values.models.checkpoints.existingClaim }}
- {name: checkpoints, mountPath: /checkpoints, readOnly: true}
{{- end }}
{{- end }}
{{- if .root.Values.nats.tls.enabled }}
- {name: nats-ca, mountPath: /etc/tideway/nats, readOnly: true}
{{- end }}
{{- end }}

{{- define "tideway.volumes" -}}
{{- $models := .root.Values.models -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .tmp }}}
{{- if has .component (list "gateway" "placement" "worker" "warm-up") }}
{{- if eq $models.cache.kind "shared" }}
- name: cache
  persistentVolumeClaim: {claimName: {{ include "tideway.cacheClaim" .root }}}
{{- else if not (and (eq $models.cache.kind "perWorker") (eq .component "worker")) }}
- name: cache
  emptyDir: {sizeLimit: {{ $models.cache.size }}}
{{- end }}
{{- with $models.checkpoints.existingClaim }}
- name: checkpoints
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end }}
{{- if .root.Values.nats.tls.enabled }}
- name: nats-ca
  secret:
    secretName: {{ .root.Values.nats.tls.secretName }}
    # Not the servers' key.
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- end }}

{{- define "tideway.cacheClaim" -}}
{{ .Values.models.cache.existingClaim | default (printf "%s-cache" (include "tideway.name" .)) }}
{{- end }}

{{- define "tideway.claim" -}}
accessModes: [{{ .mode }}]
{{- with .storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end }}

{{/* Of a service, by (dict "root" $ "replicas" 2): none while a backup is restored, since services make the streams that are missing. */}}
{{- define "tideway.replicas" -}}
{{ ternary 0 (int .replicas) (ne .root.Values.backup.restore "") }}
{{- end }}

{{/* Names of the servers in order, one a line. */}}
{{- define "tideway.natsServers" -}}
{{- $name := printf "%s-nats" (include "tideway.name" .) -}}
{{- range $i := until (int .Values.nats.replicas) }}
{{ $name }}-{{ $i }}.{{ $name }}
{{- end }}
{{- end }}

{{- define "tideway.natsUrl" -}}
{{- $urls := list -}}
{{- range splitList "\n" (include "tideway.natsServers" . | trim) -}}
{{- $urls = append $urls (printf "nats://%s:4222" .) -}}
{{- end -}}
{{ join "," $urls }}
{{- end }}

{{/* A pool with the defaults for what it does not name, as YAML; refuses what cannot work. By (dict "root" $ "pool" .). */}}
{{- define "tideway.pool" -}}
{{- $pool := mergeOverwrite (deepCopy .root.Values.workers.defaults) .pool -}}
{{- $where := printf "workers.pools: %s" $pool.name -}}
{{- if ne (int $pool.podsPerInstance) 1 -}}
{{- fail (printf "%s: podsPerInstance must be 1. The ranks of an instance are processes of one pod: they share memory (memfd) and meet on the loopback interface, so tensor and pipeline parallelism end at the node, and a LeaderWorkerSet would have nobody to lead. Take nodes with as many GPUs as an instance needs, or --quantization (docs/kubernetes.md)." $where) -}}
{{- end -}}
{{- $set := printf "%s-worker-%s%s" (include "tideway.name" .root) $pool.name (ternary "-00" "" $pool.ownNatsUsers) -}}
{{- if gt (len $set) 52 -}}
{{- fail (printf "%s: the name %s of its StatefulSet has more than 52 characters; take a shorter name for the pool or the release" $where $set) -}}
{{- end -}}
{{- $size := mul $pool.tensorParallel $pool.pipelineParallel | int -}}
{{- if eq $pool.device "cuda" -}}
{{- if eq (int $pool.gpus) 0 -}}
{{- fail (printf "%s: device cuda needs gpus" $where) -}}
{{- end -}}
{{- if mod (int $pool.gpus) $size -}}
{{- fail (printf "%s: %d GPUs do not divide into instances of tensorParallel %d x pipelineParallel %d" $where (int $pool.gpus) (int $pool.tensorParallel) (int $pool.pipelineParallel)) -}}
{{- end -}}
{{- if and (contains "/mig-" $pool.gpuResource) (gt (int $pool.gpus) 1) -}}
{{- fail (printf "%s: a CUDA process sees one MIG slice: gpus must be 1 with %s; take more replicas" $where $pool.gpuResource) -}}
{{- end -}}
{{- else if gt (int $pool.gpus) 0 -}}
{{- fail (printf "%s: gpus with device %s" $where $pool.device) -}}
{{- end -}}
{{- $isScaled := or $pool.keda.enabled (eq .root.Values.scaling.pool $pool.name) -}}
{{- if and $pool.ownNatsUsers $isScaled -}}
{{- fail (printf "%s: with ownNatsUsers each worker is a StatefulSet of its own, which neither KEDA nor scaling.pool can scale" $where) -}}
{{- end -}}
{{- if and $pool.keda.enabled (eq .root.Values.scaling.pool $pool.name) -}}
{{- fail (printf "%s: either KEDA or placement (scaling.pool) sets its replicas" $where) -}}
{{- end -}}
{{- $instances := int $pool.instances -}}
{{- if eq $instances 0 -}}
{{- $instances = ternary (div (int $pool.gpus) $size) 1 (eq $pool.device "cuda") -}}
{{- end -}}
{{- if gt (int $instances) 8 -}}
{{- fail (printf "%s: at most 8 instances a worker, as many as ports of metrics are named" $where) -}}
{{- end -}}
{{- $image := $pool.image | default (ternary "tideway-worker-cuda" "tideway-worker" (eq $pool.device "cuda")) -}}
{{- toYaml (mergeOverwrite $pool (dict "instances" $instances "image" $image)) -}}
{{- end }}

{{/* Node ids of the workers that are users of their own on NATS, one a line. */}}
{{- define "tideway.ownNodes" -}}
{{- $root := . -}}
{{- range .Values.workers.pools -}}
{{- $pool := include "tideway.pool" (dict "root" $root "pool" .) | fromYaml -}}
{{- if $pool.ownNatsUsers -}}
{{- range $i := until (int $pool.replicas) }}
{{ include "tideway.name" $root }}-worker-{{ $pool.name }}-{{ $i }}-0
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Users of NATS, one a line: the roles (worker only where a pool shares it), workers of their own, the backup. */}}
{{- define "tideway.natsUsers" -}}
{{- $nodes := include "tideway.ownNodes" . | trim | splitList "\n" | compact -}}
{{- if gt (len $nodes) 32 -}}
{{- fail "ownNatsUsers: more than 32 workers; their permissions would not fit into a ConfigMap" -}}
{{- end -}}
{{- $isShared := false -}}
{{- range .Values.workers.pools -}}
{{- if not .ownNatsUsers -}}{{- $isShared = true -}}{{- end -}}
{{- end -}}
gateway
scheduler
placement
operator
{{- if $isShared }}
worker
{{- end }}
{{- range $nodes }}
worker-{{ . }}
{{- end }}
{{- if .Values.backup.enabled }}
backup
{{- end }}
{{- end }}

{{- define "tideway.passwordVariable" -}}
NATS_{{ . | upper | replace "-" "_" }}_PASSWORD
{{- end }}
