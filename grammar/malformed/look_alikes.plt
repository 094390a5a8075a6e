train {
  clip  = 2 × 3
  steps = 10 − 3
}

expect {
  bubble ≤ 2%
}
