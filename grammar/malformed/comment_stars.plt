/* the data
   of the job */
data {
  batch = 64
}
