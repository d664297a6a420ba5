# A Nomad job of two workers: nomad job run vlm-worker.nomad.hcl
job "vlm-worker" {
  group "worker" {
    count = 2

    network {
      port "health" {}
    }

    task "worker" {
      driver       = "docker"
      kill_timeout = "60s"   # longer than VLM_WORKER__DRAIN_S

      config {
        image = "registry.example.com/vlm-fleet:torch"
        args  = ["worker"]
        ports = ["health"]
      }

      env {
        VLM_REDIS_URL           = "redis://worker:PASSWORD@redis.example.com:6379/0"
        VLM_ENGINE__MODEL       = "shapes"
        VLM_WORKER__HEALTH_HOST = "0.0.0.0"
        VLM_WORKER__HEALTH_PORT = "${NOMAD_PORT_health}"
      }

      service {
        name     = "vlm-worker"
        provider = "nomad"
        port     = "health"

        check {
          type     = "http"
          path     = "/readyz"
          interval = "10s"
          timeout  = "2s"
        }
      }

      resources {
        cpu    = 4000
        memory = 16000

        device "nvidia/gpu" {
          count = 1
        }
      }
    }
  }
}
