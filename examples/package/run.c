/* Runs `forward` of a package with one float32 input of ones:  run model.flam 4 8
   Build it with the files of the runtime, DIR=src/flambeau/package/runtime:

     cc run.c -I$DIR $DIR/{checksums,threads,machine,read,run,weights,device}.c -pthread -ldl -lm -o run */
#include <stdio.h>
#include <stdlib.h>

#include "flambeau.h"

int main(int argc, char** argv) {
  flam_error error = {0};
  flam_model* model = argc > 1 ? flam_load(argv[1], NULL, &error) : NULL;
  if (!model) {
    fprintf(stderr, "%s\n", argc > 1 ? error.message : "usage: run model.flam sizes...");
    return 1;
  }
  flam_tensor x = {NULL, FLAM_FLOAT32, argc - 2, {0}, {0}}, y = {0};
  int64_t count = 1;
  for (int k = x.rank; k-- > 0;) {
    x.sizes[k] = atoll(argv[2 + k]);
    x.strides[k] = count;
    count *= x.sizes[k];
  }
  float* data = malloc((size_t)count * sizeof *data);
  for (int64_t k = 0; k < count; ++k) data[k] = 1;
  x.data = data;
  int code = flam_run(model, flam_method(model, "forward"), &x, 1, &y, 1, &error);
  if (code) fprintf(stderr, "%s\n", error.message);
  else printf("%g\n", ((float*)y.data)[0]);
  flam_free(y.data);
  free(data);
  flam_unload(model);
  return code;
}
