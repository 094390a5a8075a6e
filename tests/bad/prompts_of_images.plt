import "base/digits.plt"

generate {
  prompts = ["seven", ""] #! E0354 E0355 E0356
}
