# The serving image, on a CUDA base. Build from the repository's root:
#   docker build -f containers/serving.Dockerfile -t outrider/serving:0.2.0 .
# torch's wheels bring their own CUDA libraries, so the base only has to expose the driver.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS environment
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY locks/serving.txt locks/serving.txt
RUN python3 -m venv /opt/outrider/environment \
 && /opt/outrider/environment/bin/pip install --no-cache-dir --no-deps --require-hashes -r locks/serving.txt
COPY serving/outrider_serving /opt/outrider/app/outrider_serving
RUN PYTHONPATH=/opt/outrider/app PYTHONDONTWRITEBYTECODE=1 python3 -m outrider_serving.native.build

FROM nvidia/cuda:13.0.1-base-ubuntu24.04
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=environment /opt/outrider/environment /opt/outrider/environment
COPY --from=environment /opt/outrider/app /opt/outrider/app
ENV PYTHONPATH=/opt/outrider/app:/opt/outrider/environment/lib/python3.12/site-packages \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
USER 65532:65532
EXPOSE 8000 9464
ENTRYPOINT ["python3", "-m", "outrider_serving"]
