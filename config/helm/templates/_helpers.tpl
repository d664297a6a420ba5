{{/* Head of an object. Arguments: root, apiVersion, kind, name, app. */}}
{{- define "fleet.head" -}}
{{- $root := index . 0 -}}
apiVersion: {{ index . 1 }}
kind: {{ index . 2 }}
metadata:
  name: {{ index . 3 }}
  labels:
    app: {{ index . 4 }}
    app.kubernetes.io/part-of: vlm-fleet
    app.kubernetes.io/instance: {{ $root.Release.Name }}
    app.kubernetes.io/managed-by: {{ $root.Release.Service }}
    helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end }}

{{/* Pod under the Pod Security Standard `restricted`. Arguments: root, user, grace; volumes: true sets fsGroup. */}}
{{- define "fleet.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .grace }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .user }}
  runAsGroup: {{ .user }}
  {{- if .volumes }}
  fsGroup: {{ .user }}
  {{- end }}
  seccompProfile: { type: RuntimeDefault }
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Spreads pods over the hosts. Argument: labels of the pods. */}}
{{- define "fleet.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: { matchLabels: {{ toJson . }} }
{{- end }}

{{- define "fleet.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end }}

{{/* Image of the fleet. Arguments: root, tag. */}}
{{- define "fleet.image" -}}
image: "{{ .root.Values.image.repository }}:{{ .tag }}"
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- end }}

{{/* Environment variable from the Secret. Arguments: root, name, key. */}}
{{- define "fleet.secret" -}}
- name: {{ .name }}
  valueFrom: { secretKeyRef: { name: {{ .root.Values.secret }}, key: {{ .key }} } }
{{- end }}

{{/* Environment variables. Arguments: root; env: values by name; secretEnv: keys of the Secret by name. */}}
{{- define "fleet.env" -}}
{{- range $name, $value := .env }}
- { name: {{ $name }}, value: {{ quote $value }} }
{{- end }}
{{- range $name, $key := .secretEnv }}
{{ include "fleet.secret" (dict "root" $.root "name" $name "key" $key) }}
{{- end }}
{{- end }}

{{/* URL and password of Redis. Arguments: root; user: Redis user of the pod. */}}
{{- define "fleet.redis" -}}
{{- $redis := .root.Values.redis -}}
{{- include "fleet.secret" (dict "root" .root "name" "REDIS_PASSWORD" "key" (printf "redis-%s-password" .user)) }}
{{- if $redis.url }}
- { name: REDIS_USER, value: {{ .user }} }
- { name: VLM_REDIS_URL, value: {{ quote $redis.url }} }
{{- else if $redis.sentinel.enabled }}
- name: VLM_REDIS_URL
  value: "redis+sentinel://{{ .user }}:$(REDIS_PASSWORD)@redis-0.redis:26379+redis-1.redis:26379+redis-2.redis:26379/fleet"
{{- else }}
- { name: VLM_REDIS_URL, value: "redis://{{ .user }}:$(REDIS_PASSWORD)@redis:6379/0" }
{{- end }}
{{- end }}

{{/* Volume claim of each pod, named `data`. Argument: storage. */}}
{{- define "fleet.claim" -}}
volumeClaimTemplates:
  - metadata: { name: data }
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .className }}
      storageClassName: {{ . }}
      {{- end }}
      resources: { requests: { storage: {{ .size }} } }
{{- end }}

{{/* Egress rule of a network policy that allows connections to Redis. Argument: root. */}}
{{- define "fleet.redisEgress" -}}
{{- if .Values.redis.url }}
- ports:
    {{- range .Values.redis.ports }}
    - { protocol: TCP, port: {{ . }} }
    {{- end }}
{{- else }}
- to: [{ podSelector: { matchLabels: { app: redis } } }]
  ports:
    - { protocol: TCP, port: 6379 }
    {{- if .Values.redis.sentinel.enabled }}
    - { protocol: TCP, port: 26379 }
    {{- end }}
{{- end }}
{{- end }}

{{/* Environment variables of files/sentinel.sh. Argument: root. */}}
{{- define "fleet.peers" -}}
{{ include "fleet.secret" (dict "root" . "name" "REDIS_REPLICA_PASSWORD" "key" "redis-replica-password") }}
- { name: POD, valueFrom: { fieldRef: { fieldPath: metadata.name } } }
- { name: SELF, value: $(POD).redis }
- { name: PEERS, value: redis-0.redis redis-1.redis redis-2.redis }
{{- end }}
