{{- define "outrider.fullname" -}}
{{- if contains "outrider" .Release.Name -}}
{{- printf "%s-operator" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-outrider-operator" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "outrider.selector" -}}
app.kubernetes.io/name: outrider-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "outrider.labels" -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: outrider
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{- end -}}

{{- define "outrider.metricsName" -}}
{{- printf "%s-metrics" (include "outrider.fullname" . | trunc 55 | trimSuffix "-") -}}
{{- end -}}

{{- define "outrider.redisName" -}}
{{- if contains "outrider" .Release.Name -}}
{{- printf "%s-redis" (.Release.Name | trunc 57 | trimSuffix "-") -}}
{{- else -}}
{{- printf "%s-outrider-redis" (.Release.Name | trunc 48 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "outrider.redisSelector" -}}
app.kubernetes.io/name: outrider-redis
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "outrider.redisLabels" -}}
{{ include "outrider.redisSelector" . }}
app.kubernetes.io/component: redis
app.kubernetes.io/part-of: outrider
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{- end -}}

{{/* What is written is on disk a second later; full, it refuses writes and throws nothing away. */}}
{{- define "outrider.redisConfig" -}}
bind * -::*
port 6379
dir /data
aclfile /etc/redis-users/users.acl
appendonly yes
appendfsync everysec
save ""
maxmemory {{ .Values.redis.maxMemory | replace "i" "b" | lower }}
maxmemory-policy noeviction
{{- end -}}

{{- define "outrider.operatorImage" -}}
{{ .Values.operator.image | default (printf "outrider/operator:%s" .Chart.AppVersion) }}
{{- end -}}

{{- define "outrider.servingImage" -}}
{{ .Values.serving.image | default (printf "outrider/serving:%s" .Chart.AppVersion) }}
{{- end -}}

{{/* What the operator may do, wherever it may do it. Each verb is one that it uses. */}}
{{- define "outrider.rules" -}}
- apiGroups: [outrider.dev]
  resources: [speculativemodels]
  verbs: [get, list, watch]
- apiGroups: [outrider.dev]
  resources: [speculativemodels/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, update, delete]
- apiGroups: [""]
  resources: [configmaps, serviceaccounts, services]
  verbs: [get, list, watch, create, patch, update]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, update, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, update]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create, patch]
{{- end -}}
