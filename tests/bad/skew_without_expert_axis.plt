import "base/gpt.plt"

parallelism {
  expert_skew = 1.5 #! W0103
}
