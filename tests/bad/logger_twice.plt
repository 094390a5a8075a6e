import "base/digits.plt"

log {
  loggers = [csv(), wandb(project = "a"), csv(required = true), wandb(project = "b")] #! E0666
}
