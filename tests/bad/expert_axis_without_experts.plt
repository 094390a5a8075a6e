import "base/gpt.plt"

parallelism {
  expert = 2 #! E0451
}
