expect {
  0 < bubble < 2%
  bubble > 0 < 2%
}
