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
