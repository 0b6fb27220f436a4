# The operator's image: no torch. Build from the repository's root:
#   docker build -f containers/operator.Dockerfile -t outrider/operator:0.2.0 .
FROM python:3.12.12-slim-bookworm AS environment
WORKDIR /src
COPY locks/operator.txt locks/operator.txt
RUN python -m venv /opt/outrider/environment \
 && /opt/outrider/environment/bin/pip install --no-cache-dir --no-deps --require-hashes -r locks/operator.txt

FROM python:3.12.12-slim-bookworm
COPY --from=environment /opt/outrider/environment /opt/outrider/environment
COPY operator/outrider_operator /opt/outrider/app/outrider_operator
COPY serving/outrider_serving /opt/outrider/app/outrider_serving
ENV PYTHONPATH=/opt/outrider/app:/opt/outrider/environment/lib/python3.12/site-packages \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
USER 65532:65532
ENTRYPOINT ["python3", "-m", "outrider_operator"]
